"""Train a language agent: warm-up on demonstrations, then reinforcement learning on its own rollouts.

    python -m scripts.train --config=configs/frozenlake_cpu.py --workdir=runs/frozenlake_cpu [--config.optim.lr=1e-4 ...]

Everything goes to the workdir: config.json, metrics.jsonl, tensorboard/, checkpoints/, and at the end report.md with curves.png and
the trained model in Hugging Face form under model/. The same command again goes on from the newest whole checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from absl import flags

from common.config import Config, validate
from common.metrics import RunLog, Stopwatch
from common.progress import progress_bar
from common.report import summary_lines, write_report
from common.rollout.demonstrations import WarmupDemonstrations
from common.rollout.environment import load_task_suite
from common.rollout.evaluate import evaluation_metrics, rollout_metrics
from common.rollout.preflight import check_suite
from common.rollout.runner import RolloutRunner
from common.rollout.tasks import PromptCursor
from common.transfer.store.memory import MemoryStore
from common.types import Split
from common.workdir import open_workdir, record_config
from rose_jax.advantages import score_groups
from rose_jax.batching import demonstration_batch, rl_batch
from rose_jax.checkpoint import Checkpoints, config_fingerprint
from rose_jax.export import save_checkpoint
from rose_jax.learner import Learner
from rose_jax.mesh import make_mesh
from rose_jax.policy import build_policy
from rose_jax.publishing import LearnerPublisher
from rose_jax.update import Phase
from scripts import entry
from scripts.replicas import make_replica

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "A folder for this run; the same command again goes on from what it holds.", flag_values=_FLAGS
)

NUM_REPORTED_TRAJECTORIES = 4


def train(config: Config, workdir: Path, stack: contextlib.ExitStack) -> None:
    """One run from its newest checkpoint to its report; what it opens is closed with `stack`."""
    # Build every part, and go on from the newest checkpoint if there is one.
    suite = load_task_suite(config.env.factory, config.env.options)
    mesh = make_mesh(config.mesh)
    policy = build_policy(config, suite, mesh)
    check_suite(config, suite, policy.chat)
    learner = Learner(config, policy.model_config, mesh, policy.params)
    fingerprint = config_fingerprint(config, policy.model_config)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep, fingerprint=fingerprint)
    stack.callback(checkpoints.close)
    num_prompts_taken = 0
    restored = checkpoints.restore_latest(learner.abstract_arrays())
    if restored is not None:
        learner.load(restored.arrays, restored.progress["learner"])
        num_prompts_taken = restored.progress["prompts_taken"]
        print(f"Going on after {learner.num_warmup_updates} warm-up updates and {learner.version} versions")
    cursor = PromptCursor(suite, seed=config.seed, num_taken=num_prompts_taken)
    for line in record_config(workdir, config):
        print(f"Configuration changed since this run began: {line}")
    num_done = {"warmup": learner.num_warmup_updates, "train": learner.version, "eval": learner.version, "checkpoint": learner.step}
    log = RunLog(workdir, after=num_done)
    stack.callback(log.close)

    def save() -> None:
        """Called when the rows of all that the checkpoint holds are in the log: a resumed run would not write them again."""
        watch = Stopwatch()
        with watch.part("checkpoint_s"):
            progress = {"learner": learner.progress(), "prompts_taken": cursor.num_taken}
            checkpoints.save(learner.step, arrays=learner.arrays(), progress=progress)
        log.write("checkpoint", learner.step, watch.seconds)

    if learner.phase is Phase.WARMUP:
        warm_up(config, learner, WarmupDemonstrations(config, suite, policy.chat), log, save)
        learner.start_reinforcement()
        if learner.step not in checkpoints.steps:  # else a kill ended the run just here, or a shorter warm-up was asked for
            save()

    store = MemoryStore()
    publisher = LearnerPublisher(config, store)
    stack.callback(publisher.close)
    replica = make_replica("local", config, policy.model_config, store)
    runner = stack.enter_context(RolloutRunner(config, suite, policy.chat, replica))

    def publish() -> dict[str, float]:
        """Bring the learner's version to the replica; from then on it generates with it."""
        published, metrics = publisher.publish(learner)
        runner.sync_weights(learner.version)
        differing = replica.differing_tensors(published) if config.transfer.verify else []
        assert not differing, f"version {learner.version}: the replica's {differing} are not what was published"
        return metrics

    publish()

    def evaluate_if_due() -> None:
        """Sampled and greedy success on held-out tasks: before, after, and every `interval` versions on fewer tasks."""
        is_outer = learner.version in (0, config.num_versions)
        is_due = is_outer or (config.eval.interval and learner.version % config.eval.interval == 0)
        if not is_due or learner.version in log.series("eval", "sampled")[0]:
            return
        num_tasks = config.eval.num_tasks if is_outer else config.eval.num_tasks_in_run
        watch = Stopwatch()
        with watch.part("eval_s"), progress_bar("evaluate", 2 * num_tasks, "episode") as bar:
            sampled = runner.evaluate(num_tasks, temperature=1.0, on_trajectory=bar.count)
            greedy = runner.evaluate(num_tasks, temperature=0.0, on_trajectory=bar.count)
        log.write("eval", learner.version, evaluation_metrics(sampled=sampled, greedy=greedy) | watch.seconds)

    with progress_bar("train", config.num_versions, "version", initial=learner.version) as train_bar:
        while learner.version < config.num_versions:
            evaluate_if_due()
            watch = Stopwatch()
            num_episodes = config.grpo.prompts_per_step * config.grpo.group_size
            with watch.part("rollout_s"), progress_bar("rollout", num_episodes, "episode", nested=True) as bar:
                groups = runner.collect(cursor, on_trajectory=bar.count)
            with watch.part("update_s"):
                batch = rl_batch(score_groups(groups, normalize_std=config.grpo.normalize_std))
                metrics = learner.update(batch)
            with watch.part("publish_s"):
                metrics |= publish()
            rollout = rollout_metrics(groups, runner.counters, watch.seconds["rollout_s"])
            log.write("train", learner.version, metrics | rollout | watch.seconds)
            if learner.version % config.checkpoint.interval == 0 or learner.version == config.num_versions:
                save()
            train_bar.advance(success=rollout["rollout_success"], tokens_per_s=rollout["rollout_tokens_per_s"])
    evaluate_if_due()

    save_checkpoint(
        workdir / "model",
        learner.published_params(),
        policy.model_config,
        dtype=config.model.weights_dtype,
        save_tokenizer=policy.chat.save,
        overwrite=True,
    )
    examples = runner.evaluate(min(NUM_REPORTED_TRAJECTORIES, suite.num_tasks(Split.HELD_OUT)), temperature=1.0)
    report = write_report(log, workdir, examples)
    print("\n".join(["", *summary_lines(log), f"Report: {report}"]))


def warm_up(config: Config, learner: Learner, demonstrations: WarmupDemonstrations, log: RunLog, save: Callable[[], None]) -> None:
    """Supervised updates; the weights with the lowest loss on validation tasks are the ones that stay."""
    warmup = config.warmup
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
            log.write("warmup", num_updates, metrics | watch.seconds)
            if num_updates % config.checkpoint.warmup_interval == 0 and num_updates < warmup.num_updates:
                save()
            bar.advance(loss=metrics["loss"])


def main() -> None:
    config = _CONFIG.value
    validate(config)
    with open_workdir(Path(str(_WORKDIR.value))) as workdir, contextlib.ExitStack() as stack:
        train(config, workdir, stack)


if __name__ == "__main__":
    entry.run(main, required=["config", "workdir"], after_interrupt="The same command goes on from the newest checkpoint.")
