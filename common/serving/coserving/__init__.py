"""One device, two models: rollouts in the gaps of live traffic. Start with executor.py and admission.py."""
