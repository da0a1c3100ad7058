"""Local sandboxes that keep snapshots, and tell what happens to them: a line per event in the file `env.EVENTS`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import CannotBeKept, DiskFull, RuntimeFault
from polarq_worker.runtimes.base import Host, Snapshot
from polarq_worker.runtimes.local import LocalRuntime
from tests.durable import boxes


class PlainBox(LocalRuntime):
    """Takes no snapshots, and any spec."""

    @classmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        return []

    def tell(self, *words: str) -> None:
        with Path(self.spec.env["EVENTS"]).open("a") as events:
            events.write(" ".join(words) + "\n")

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return False

    @classmethod
    def takes_snapshots(cls, host: Host) -> bool:
        return False

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        name = Path(snapshot).name if snapshot else "nothing"
        self.tell("start", self.runtime_id, name, "online" if online else "offline")
        await super().start()
        if snapshot:
            if not Path(snapshot).is_dir():
                raise RuntimeFault(f"there is no snapshot {snapshot}")
            shutil.copytree(snapshot, self.layout.session_dir, dirs_exist_ok=True)

    async def stop(self) -> None:
        await super().stop()
        self.tell("stop", self.runtime_id)


class SnapBox(PlainBox):
    """Its session folder is what a snapshot keeps."""

    @classmethod
    def takes_snapshots(cls, host: Host) -> bool:
        return True

    @classmethod
    def kept_in(cls, host: Host) -> Path:
        assert host.folder is not None
        return host.folder / cls.__name__

    async def snapshot(self, name: str) -> Snapshot:
        target = self.kept_in(self.host) / name
        shutil.copytree(self.layout.session_dir, target)
        self.tell("snapshot", self.runtime_id, name)
        return described(target)

    @classmethod
    async def snapshots(cls, host: Host) -> list[Snapshot]:
        folder = cls.kept_in(host)
        return [described(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []

    @classmethod
    async def drop_snapshot(cls, reference: str, host: Host) -> None:
        shutil.rmtree(reference, ignore_errors=True)


class UnkeptBox(SnapBox):
    """Finds that what was prepared holds for itself alone."""

    async def snapshot(self, name: str) -> Snapshot:
        self.tell("unkept", self.runtime_id)
        raise CannotBeKept("its files name their own folder")


class FullBox(SnapBox):
    """Of a disk that has room for sandboxes, and for no snapshot."""

    async def snapshot(self, name: str) -> Snapshot:
        self.tell("full", self.runtime_id)
        raise DiskFull("no space left on device")


class OfflineBox(SnapBox):
    """Says that it keeps programs off the network."""

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return True


class LastingBox(SnapBox):
    """Beside it runs a process that outlives its worker; its number is in a file beside the events."""

    reach: ClassVar[Reach] = Reach.NODE

    @property
    def handle(self) -> str:
        return f"{self.spec.env['EVENTS']}.{self.runtime_id}"

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        await super().start(snapshot=snapshot, online=online)
        boxes.begin(Path(self.handle))

    async def stop(self) -> None:
        boxes.end(Path(self.handle))
        await super().stop()

    @classmethod
    async def stop_orphan(cls, record: SandboxRecord) -> None:
        boxes.end(Path(record.handle))


def described(folder: Path) -> Snapshot:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Snapshot(folder.name, str(folder), size)
