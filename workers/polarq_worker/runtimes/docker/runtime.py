"""Runtime `docker`: a container for every sandbox, on a daemon of Docker or Podman, here or on another machine.

Nothing of the host is mounted in it but what the task names and the topology allows: files go in and out through the
daemon's archive calls, so that no owner has to be mapped and no folder opened for everybody.

    in the container        on the host
    /polar/session          <root>/          0700, gone after stop()
    /polar/run                logs/          output of commands, progress of the image's pull
    /polar/home                              of a user to whom the image gives none
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from aiodocker import Docker

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import ImageMissing, RuntimeFault, SandboxLost
from polarq_worker.network.forwarder import forwarded_door
from polarq_worker.network.way_out import WayOut, over
from polarq_worker.runtimes.archives.pack import Owner
from polarq_worker.runtimes.base import SESSION_DIR, ExecResult, Host, Runtime, SandboxLayout, Snapshot
from polarq_worker.runtimes.docker import config, doors, images, kept
from polarq_worker.runtimes.docker.archive import Archive
from polarq_worker.runtimes.docker.daemon import Refusal, address, asking, connect, connected
from polarq_worker.runtimes.docker.executor import Executor
from polarq_worker.runtimes.docker.files import Files, absolute
from polarq_worker.runtimes.docker.folders import session_folders
from polarq_worker.runtimes.docker.remove import removed
from polarq_worker.runtimes.docker.users import owner_of, with_home
from polarq_worker.runtimes.fetched import Fetched
from polarq_worker.runtimes.processes import uninterrupted
from polarq_worker.runtimes.root import Root
from polarq_worker.runtimes.starting import Starting

START_S = 600.0


class DockerRuntime(Runtime):
    """See the module's text."""

    reach = Reach.NODE

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path, host: Host | None = None) -> None:
        super().__init__(spec, runtime_id=runtime_id, root=root, host=host)
        self._container = config.name(runtime_id, self.host)
        self._starting = Starting()
        self._docker: Docker | None = None
        self._executor: Executor | None = None
        self._stopped = False
        self._root = Root(self.root)
        self._asked_for = False
        """The daemon may have a container of ours."""
        self._from_snapshot = False
        self._image_id = ""
        self._user = ""
        self._owner = Owner()
        self._environment: dict[str, str] = {}

    # --- what it can do

    @classmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        return config.problems(spec)

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return not doors.obstacle(host)

    @classmethod
    def takes_snapshots(cls, host: Host) -> bool:
        return True

    @classmethod
    async def resolve_image(cls, spec: RuntimeSpec, host: Host) -> str:
        async with connected(host) as docker:
            return images.digest(await images.brought(docker, host, spec.image.strip(), lambda _: None))

    @property
    def isolation(self) -> str:
        return "container"

    @property
    def image_id(self) -> str:
        return self._image_id

    # --- when its worker is gone

    @property
    def handle(self) -> str:
        """The container's name; behind it the daemon's address, where the topology names one."""
        url = self.host.settings.docker.url
        return f"{self._container} {url}" if url else self._container

    @classmethod
    async def stop_orphan(cls, record: SandboxRecord) -> None:
        name, _, url = record.handle.partition(" ")
        host = Host()
        if url:
            docker = host.settings.docker.model_copy(update={"url": url})
            host = Host(settings=host.settings.model_copy(update={"docker": docker}))
        async with connected(host) as client:
            await removed(client, name)

    @classmethod
    async def sweep(cls, host: Host, keep: Collection[str]) -> list[str]:
        if not host.settings.docker.url and not _has_daemon(host):
            return []
        labels = [f"{key}={value}" for key, value in config.own(host).items()]
        swept = []
        async with connected(host) as docker:
            async with asking("list containers"):
                found = await docker.containers.list(all=True, filters=json.dumps({"label": labels}))
            for container in found:
                runtime_id = container["Labels"].get(config.RUNTIME, "")
                if runtime_id not in keep and config.is_own(container["Labels"], host):
                    await removed(docker, container.id)
                    swept.append(runtime_id)
            await kept.clean(docker, host, alone=True)
        return swept

    # --- its life

    @property
    def layout(self) -> SandboxLayout:
        return SandboxLayout.below(SESSION_DIR)

    @property
    def host_log_dir(self) -> Path:
        return self.root / "logs"

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        await self._starting.run(self._start(snapshot, online))

    async def _start(self, snapshot: str | None, online: bool) -> None:
        await self._root.make({"logs": 0o700, "sockets": 0o755})
        self._docker = docker = connect(self.host)
        image = self.spec.image.strip()
        if snapshot is None:
            described = await images.brought(docker, self.host, image, self._pull_line)
            self._image_id = images.digest(described)
        else:
            found = await images.found(docker, snapshot)
            if found is None:
                raise ImageMissing(f"snapshot {snapshot} is gone")
            described, image, self._from_snapshot = found, snapshot, True
            self._image_id = (described["Config"].get("Labels") or {}).get(config.IMAGE, "")
        of_image = described.get("Config") or {}
        self._environment = WayOut(cut_off=not online).stripped(config.environment(of_image.get("Env") or []))
        self._user = self.spec.user or of_image.get("User") or ""
        self._asked_for = True
        # The daemon goes on with what it was asked for, whoever has gone meanwhile: its answer is waited for.
        await uninterrupted(self._begin(docker, image, online))
        settings = self.host.settings.docker
        limit = self.spec.max_processes or settings.max_processes
        self._executor = Executor(docker, self._container, self.spec, max_processes=limit)

    async def alive(self) -> bool:
        return self._executor is not None and not await self._executor.why_lost()

    async def snapshot(self, name: str) -> Snapshot:
        docker = self._there("snapshot")
        return await kept.take(docker, self.host, self._container, name, user=self._user, image_id=self._image_id)

    @classmethod
    async def snapshots(cls, host: Host) -> list[Snapshot]:
        return await kept.all_of(host)

    @classmethod
    async def drop_snapshot(cls, reference: str, host: Host) -> None:
        await kept.drop(host, reference)

    async def open_door(self, port: int) -> socket.socket:
        docker = self._there("open a door")
        if why := doors.obstacle(self.host):
            raise RuntimeFault(f"no door into a sandbox's network can be made: {why}")
        if not doors.can_enter():
            return await forwarded_door(self, self._sockets, config.SOCKETS, port, user="0")
        async with asking("open a door"):
            described = await docker.containers.container(self._container).show()
        return await doors.opened(int(described["State"]["Pid"]), str(described["Id"]), port)

    async def _exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: bytes | None,
        timeout_s: float,
        log: str | None,
        max_output_bytes: int,
    ) -> ExecResult:
        if self._executor is None or self._stopped:
            return ExecResult(
                ExecKind.SANDBOX_LOST, message="it was stopped" if self._stopped else "it was not started"
            )
        try:
            folder = absolute(cwd, self.workdir) if cwd else self.workdir
            who = user or self._user
            owner = self._owner
            if who != self._user:
                owner = await owner_of(Archive(self._there("look up a user"), self._container), who)
        except RuntimeFault as exc:
            return ExecResult(ExecKind.COULD_NOT_START, message=str(exc))
        named = {"POLARQ_RUNTIME_ID": self.runtime_id, "PWD": folder}
        return await self._executor.run(
            command,
            cwd=folder,
            env={**over(self._environment, {**self.spec.env, **(env or {})}), **named},
            user=who,
            owner=owner,
            stdin=stdin,
            timeout_s=timeout_s,
            log=None if log is None else self.host_log_dir / log,
            max_output_bytes=max_output_bytes,
        )

    async def put_file(self, source: Path, target: str) -> None:
        what, files = self._files("upload to", target)
        await files.put_file(what, source, target)

    async def put_dir(self, source: Path, target: str) -> None:
        what, files = self._files("upload to", target)
        await files.put_dir(what, source, target)

    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None:
        what, files = self._files("write", target)
        await files.put_bytes(what, data, target, mode)

    async def get_file(self, source: str, target: Path, max_bytes: int) -> None:
        what, files = self._files("fetch", source)
        await files.get_file(what, source, target, max_bytes)

    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> Fetched:
        what, files = self._files("fetch", source)
        return await files.get_dir(what, source, target, max_bytes, max_files)

    async def end_background(self) -> bool:
        return self._executor is not None and await self._executor.end_background()

    async def stop(self) -> None:
        self._stopped = True
        if self._executor is not None:
            self._executor.stopping = True
            self._executor.lose("it was stopped")
        await uninterrupted(self._stop())

    # --- parts

    @property
    def _sockets(self) -> Path:
        return self.root / "sockets"

    @staticmethod
    def _is_led_out(online: bool) -> bool:
        """Whether its doors are sockets that are mounted in."""
        return not online and not doors.can_enter()

    async def _begin(self, docker: Docker, image: str, online: bool) -> None:
        """Creates and starts the container."""
        body = config.container(
            self.spec,
            self.host,
            runtime_id=self.runtime_id,
            image=image,
            image_id=self._image_id,
            online=online,
            sockets=self._sockets if self._is_led_out(online) else None,
        )
        try:
            async with asking("create the sandbox", START_S):
                container = await docker.containers.create(body, name=self._container)
            archive = Archive(docker, self._container)
            self._owner = await owner_of(archive, self._user)
            if not self._from_snapshot:
                passwd = await with_home(archive, self._owner)
                folders = session_folders(self.layout, self.workdir, self._owner, passwd)
                await archive.put("make the session's folders", folders)
            async with asking("start the sandbox", START_S):
                await container.start()
        except Refusal as exc:
            raise RuntimeFault(f"{exc}{self._advice()}") from None

    def _advice(self) -> str:
        """What the task asked for that not every daemon can give."""
        asked = [
            (
                self.spec.storage_mb is not None,
                "storage_mb needs a storage driver with quotas (overlay2 on xfs, btrfs)",
            ),
            (self.spec.gpus > 0, "gpus needs NVIDIA's container toolkit"),
        ]
        lines = [line for is_asked, line in asked if is_asked]
        return f" ({'; '.join(lines)})" if lines else ""

    def _files(self, verb: str, path: str) -> tuple[str, Files]:
        """And what is done. Raises `SandboxLost`."""
        what = f"{verb} {path}"
        return what, Files(self._there(what), self._container, self._owner, self.workdir)

    def _there(self, what: str) -> Docker:
        """Raises `SandboxLost`."""
        why = "it was not started" if self._executor is None else self._executor.lost
        if why or self._docker is None:
            raise SandboxLost(f"{what}: the sandbox was lost: {why}")
        return self._docker

    def _pull_line(self, line: str) -> None:
        with (self.host_log_dir / "image.pull").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    async def _stop(self) -> None:
        await self._starting.end()
        try:
            if self._docker is not None:
                if self._asked_for:
                    await removed(self._docker, self._container)
                    self._asked_for = False
                if self._executor is not None:
                    await self._executor.close()
                if self._from_snapshot:
                    await kept.clean(self._docker, self.host)
                docker, self._docker = self._docker, None
                await docker.close()
        finally:
            await self._root.remove()


def _has_daemon(host: Host) -> bool:
    try:
        address(host)
    except RuntimeFault:
        return False
    return True
