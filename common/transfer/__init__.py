"""Weights from the learner to every replica: exact differences, versions, stores. numpy and small libraries only."""
