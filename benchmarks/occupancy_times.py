"""Writes `occupancy_times.csv`: how long the stages of rollouts take, drawn with heavy tails from a fixed seed.

    python -m benchmarks.occupancy_times

Sixty-four tasks of eight rollouts each, as a step of training has them. What belongs to a recipe (its image's start and
its preparation) is drawn per task; a harness's run and its grading per rollout. Preparation, run and grading are
log-normal, the run also cut off where a budget would end it: half of all runs are over in five minutes, one in twenty
takes more than twenty-five.
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

FILE = Path(__file__).with_name("occupancy_times.csv")
SEED = 20
TASKS, SAMPLES = 64, 8
COLUMNS = ("task", "start_s", "prepare_s", "keep_s", "from_snapshot_s", "run_s", "evaluate_s")


def rows() -> list[tuple[int, float, float, float, float, float, float]]:
    draw = random.Random(SEED)

    def heavy(median_s: float, sigma: float, least_s: float, most_s: float) -> float:
        return round(min(max(draw.lognormvariate(math.log(median_s), sigma), least_s), most_s), 2)

    made = []
    for task in range(TASKS):
        start_s = heavy(3.0, 0.4, 1.0, 20.0)
        prepare_s = heavy(60.0, 0.9, 5.0, 900.0)
        keep_s = heavy(2.0, 0.5, 0.5, 20.0)
        for _ in range(SAMPLES):
            from_snapshot_s = heavy(1.0, 0.3, 0.3, 5.0)
            made.append(
                (
                    task,
                    start_s,
                    prepare_s,
                    keep_s,
                    from_snapshot_s,
                    heavy(300.0, 1.0, 10.0, 3600.0),
                    heavy(40.0, 0.9, 2.0, 900.0),
                )
            )
    return made


def main() -> None:
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())


if __name__ == "__main__":
    main()
