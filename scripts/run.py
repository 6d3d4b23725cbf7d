"""The parts of a training run, put together and brought to where the newest checkpoint left them.

What happens once a version (publish, save, evaluate) is a method here; the order of things is scripts/train.py's. Invariant: a
checkpoint holds parameters, optimizer, and the prompts that were trained on, together, and its rows are in the log before it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from common.config import Config
from common.metrics import RunLog, Stopwatch
from common.progress import progress_bar
from common.rollout.environment import TaskSuite, load_task_suite
from common.rollout.evaluate import evaluation_metrics
from common.rollout.preflight import check_suite
from common.rollout.runner import RolloutRunner
from common.rollout.tasks import PromptCursor
from common.transfer.store.memory import MemoryStore
from common.workdir import record_config
from rose_jax.checkpoint import Checkpoints, config_fingerprint
from rose_jax.export import save_checkpoint
from rose_jax.learner import Learner
from rose_jax.mesh import make_mesh
from rose_jax.policy import Policy, build_policy
from rose_jax.publishing import LearnerPublisher
from scripts.fleet import open_fleet
from scripts.replicas import TrainingReplica, make_replica
from scripts.traffic import OnlineTraffic


@dataclasses.dataclass(kw_only=True)
class Run:
    """See the module. Made by `open_run`."""

    config: Config
    workdir: Path
    suite: TaskSuite
    policy: Policy
    learner: Learner
    checkpoints: Checkpoints
    cursor: PromptCursor
    log: RunLog
    publisher: LearnerPublisher
    replica: TrainingReplica
    runner: RolloutRunner
    traffic: OnlineTraffic

    def save(self) -> None:
        """Write a checkpoint."""
        watch = Stopwatch()
        with watch.part("checkpoint_s"):
            progress = {"learner": self.learner.progress(), "prompts_taken": self.cursor.num_taken}
            self.checkpoints.save(self.learner.step, arrays=self.learner.arrays(), progress=progress)
        self.log.write("checkpoint", self.learner.step, watch.seconds)

    def publish(self) -> dict[str, float]:
        """Bring the learner's version to the replica; from then on it generates with it."""
        published, metrics = self.publisher.publish(self.learner)
        self.runner.sync_weights(self.learner.version)
        differing = self.replica.differing_tensors(published) if self.config.transfer.verify else []
        assert not differing, f"version {self.learner.version}: {differing} are not what was published"
        return metrics

    def evaluate_if_due(self) -> None:
        """Sampled and greedy success on held-out tasks: before, after, and every `interval` versions on fewer tasks."""
        version, settings = self.learner.version, self.config.eval
        is_outer = version in (0, self.config.num_versions)
        is_due = is_outer or (settings.interval and version % settings.interval == 0)
        if not is_due or version in self.log.series("eval", "sampled")[0]:
            return
        num_tasks = settings.num_tasks if is_outer else settings.num_tasks_in_run
        watch = Stopwatch()
        with watch.part("eval_s"), progress_bar("evaluate", 2 * num_tasks, "episode") as bar:
            sampled = self.runner.evaluate(num_tasks, temperature=1.0, on_trajectory=bar.count)
            greedy = self.runner.evaluate(num_tasks, temperature=0.0, on_trajectory=bar.count)
        self.log.write("eval", version, evaluation_metrics(sampled=sampled, greedy=greedy) | watch.seconds)

    def export_model(self) -> None:
        """The policy as a Hugging Face folder, workdir/model."""
        save_checkpoint(
            self.workdir / "model",
            self.learner.published_params(),
            self.policy.model_config,
            dtype=self.config.model.weights_dtype,
            save_tokenizer=self.policy.chat.save,
            overwrite=True,
        )


def open_run(config: Config, workdir: Path, stack: contextlib.ExitStack) -> Run:
    """Build every part; what needs closing is closed with `stack`.

    Raises:
        ValueError: parts of the configuration do not fit each other, or the workdir holds another run.
        CheckpointError: a model or a checkpoint cannot be used.
    """
    traffic = OnlineTraffic(config, workdir)
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
    for line in record_config(workdir, config):
        print(f"Configuration changed since this run began: {line}")
    num_done = {"warmup": learner.num_warmup_updates, "train": learner.version, "eval": learner.version, "checkpoint": learner.step}
    log = RunLog(workdir, after=num_done)
    stack.callback(log.close)
    store = MemoryStore()
    publisher = LearnerPublisher(config, store)
    stack.callback(publisher.close)
    replica: TrainingReplica = (
        open_fleet(config, workdir, store, stack)
        if config.fleet.replicas
        else make_replica("local", config, policy.model_config, store)
    )
    runner = stack.enter_context(RolloutRunner(config, suite, policy.chat, replica))
    stack.callback(traffic.stop)  # before the replicas end
    return Run(
        config=config,
        workdir=workdir,
        suite=suite,
        policy=policy,
        learner=learner,
        checkpoints=checkpoints,
        cursor=PromptCursor(suite, seed=config.seed, num_taken=num_prompts_taken),
        log=log,
        publisher=publisher,
        replica=replica,
        runner=runner,
        traffic=traffic,
    )
