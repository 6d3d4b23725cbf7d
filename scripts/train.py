"""Train a language agent: warm-up on demonstrations, then reinforcement learning on its own rollouts.

    python -m scripts.train --config=configs/frozenlake_cpu.py --workdir=runs/frozenlake_cpu [--config.optim.lr=1e-4 ...]

Everything goes to the workdir: config.json, metrics.jsonl, tensorboard/, checkpoints/, logs/ of replica processes, and at the end
report.md with curves.png and the trained model in Hugging Face form under model/. Online traffic beside a run leaves traffic/ and
coserving.json too. The same command again goes on from the newest whole checkpoint.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from absl import flags

from common.config import Config, validate
from common.metrics import Stopwatch
from common.progress import progress_bar
from common.report import summary_lines, write_report
from common.report_coserving import read_coserving, write_coserving
from common.rollout.demonstrations import WarmupDemonstrations
from common.rollout.evaluate import rollout_metrics, tokens_per_replica
from common.types import Split
from common.workdir import open_workdir
from rose_jax.advantages import score_groups
from rose_jax.batching import demonstration_batch, rl_batch
from rose_jax.update import Phase
from scripts import entry
from scripts.run import Run, open_run

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "A folder for this run; the same command again goes on from what it holds.", flag_values=_FLAGS
)

NUM_EXAMPLES = 16
"""Held-out episodes played for the report, which shows one that was solved and one that was not."""


def train(config: Config, workdir: Path, stack: contextlib.ExitStack) -> None:
    """One run, from its newest checkpoint to its report; what it opens is closed with `stack`."""
    run = open_run(config, workdir, stack)
    learner, runner, log = run.learner, run.runner, run.log
    if learner.phase is Phase.WARMUP:
        warm_up(run)
    run.publish()
    run.traffic.start()

    with progress_bar("train", config.num_versions, "version", initial=learner.version) as train_bar:
        while learner.version < config.num_versions:
            run.evaluate_if_due()
            watch = Stopwatch()
            num_episodes = config.grpo.prompts_per_step * config.grpo.group_size
            with watch.part("rollout_s"), progress_bar("rollout", num_episodes, "episode", nested=True) as bar:
                groups = runner.collect(run.cursor, on_trajectory=bar.count)
            with watch.part("update_s"):
                batch = rl_batch(score_groups(groups, normalize_std=config.grpo.normalize_std))
                metrics = learner.update(batch)
            with watch.part("publish_s"):
                metrics |= run.publish()
            rollout = rollout_metrics(groups, runner.counters, watch.seconds["rollout_s"])
            rollout |= tokens_per_replica(runner.counters_by_replica)
            log.write("train", learner.version, metrics | rollout | watch.seconds)
            if learner.version % config.checkpoint.interval == 0 or learner.version == config.num_versions:
                run.save()
            train_bar.advance(success=float(rollout["rollout_success"]), tokens_per_s=float(rollout["rollout_tokens_per_s"]))
    run.evaluate_if_due()

    run.export_model()
    examples = runner.evaluate(min(NUM_EXAMPLES, run.suite.num_tasks(Split.HELD_OUT)), temperature=1.0)
    problems = run.traffic.stop()
    coserved = read_coserving(log, workdir)
    report = write_report(log, workdir, examples, write_coserving(coserved, workdir))
    told = [*problems, *(line for each in coserved for line in each.lines())]
    print("\n".join(["", *summary_lines(log), *told, f"Report: {report}"]))


def warm_up(run: Run) -> None:
    """Supervised updates; the weights with the lowest loss on validation tasks are the ones that stay."""
    warmup, learner = run.config.warmup, run.learner
    demonstrations = WarmupDemonstrations(run.config, run.suite, run.policy.chat)
    validation = demonstration_batch(demonstrations.validation()) if warmup.validation_interval else None
    with progress_bar("warm-up", warmup.num_updates, "update", initial=learner.num_warmup_updates) as bar:
        while learner.num_warmup_updates < warmup.num_updates:
            watch = Stopwatch()
            with watch.part("warmup_s"):
                metrics = learner.supervised_update(demonstration_batch(demonstrations.batch(learner.num_warmup_updates)))
                num_updates = learner.num_warmup_updates
                if validation is not None and num_updates % warmup.validation_interval == 0:
                    metrics["validation_loss"] = learner.supervised_eval(validation)
                    learner.keep_if_best(metrics["validation_loss"])
            run.log.write("warmup", num_updates, metrics | watch.seconds)
            if num_updates % run.config.checkpoint.warmup_interval == 0 and num_updates < warmup.num_updates:
                run.save()
            bar.advance(loss=metrics["loss"])
    learner.start_reinforcement()
    if learner.step not in run.checkpoints.steps:  # else a kill ended the run just here, or a shorter warm-up was asked for
        run.save()


def main() -> None:
    config = _CONFIG.value
    validate(config)
    with open_workdir(Path(str(_WORKDIR.value))) as workdir, contextlib.ExitStack() as stack:
        train(config, workdir, stack)


if __name__ == "__main__":
    entry.run(main, required=["config", "workdir"], after_interrupt="The same command goes on from the newest checkpoint.")
