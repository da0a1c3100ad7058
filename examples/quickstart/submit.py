"""A trainer in a few lines: submits a task, waits, and looks at what can be trained on.

Needs a deployment, for instance the one that `polarq demo --keep` leaves running (it prints what to set), and only
`pip install polarq` here.
"""

from pathlib import Path

from polarq import submit_rollout


def main() -> None:
    batch = submit_rollout.delay(Path(__file__).with_name("task.yaml"))
    result = batch.get(timeout=300)
    for rollout in result.results:
        reward = None if rollout.reward is None else rollout.reward.outcome
        print(rollout.rollout_id, rollout.outcome.state.value, "reward", reward)
        for trace in rollout.trajectory.traces if rollout.trajectory else []:
            print(f"  trace {trace.index}: {len(trace.prompt_ids)} prompt ids, {trace.trainable_tokens} to train on")


if __name__ == "__main__":
    main()
