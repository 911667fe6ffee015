"""A slow, obvious model of a GPU with streams, to compare the virtual device with: it looks at every microsecond.

A program is a list of commands in the order in which the host issues them:

    ("work", stream, us)            ("record", stream, event)        ("wait", stream, event)
    ("send", stream, us)            ("receive", stream, n, us)       the n-th send
    ("host", us)                    ("host waits", stream or None)   ("host waits for event", event)
    ("replay", stream, graph)       graph: a list of the commands of streams, with events and sends of its own

At every microsecond, as long as anything changes: the host issues what it is done with issuing, and each stream looks
at the first thing in its queue. Nothing is computed ahead. It shares no code with the package.
"""

from __future__ import annotations

from typing import Any

Command = tuple[Any, ...]
FOREVER = 100_000


class Entry:
    """Something that was issued, and when it began and ended."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.begin: int | None = None
        self.end: int | None = None
        self.waits_for: Entry | None = None  # the record, or the send, that it needs
        self.inside: dict[str, list[Entry]] = {}  # of a graph: its own queues
        self.parts: list[Entry] = []  # of a graph: its nodes in order


class Model:
    def __init__(self, launch: int = 0, record: int = 0, wait: int = 0) -> None:
        self.costs = {"work": launch, "send": launch, "receive": launch, "replay": launch}
        self.costs |= {"record": record, "wait": wait}
        self.now = 0
        self.queues: dict[str, list[Entry]] = {}
        self.entries: list[Entry] = []
        self.records: dict[Any, Entry] = {}
        self.sends: list[Entry] = []

    def run(self, commands: list[Command]) -> list[Entry]:
        """Each command's entry; `host` is the time at which the host was done."""
        program = list(commands)
        issuing: Command | None = None
        ready_at = 0
        for self.now in range(FOREVER):
            changed = True
            while changed:
                changed = self.look_at(self.queues)
                if issuing is None and program:
                    issuing = program.pop(0)
                    if "host waits" in issuing[0]:
                        self.entries.append(Entry(issuing))
                        self.entries[-1].begin = self.now
                    ready_at = self.now + (issuing[1] if issuing[0] == "host" else self.costs.get(issuing[0], 0))
                    changed = True
                if issuing is not None and self.now >= ready_at and self.may_go_on(issuing):
                    self.issue(issuing)
                    issuing = None
                    self.host = self.now
                    changed = True
            if issuing is None and not program and not any(self.queues.values()):
                return self.entries
        raise RuntimeError("the model never comes to an end")

    def may_go_on(self, command: Command) -> bool:
        if command[0] == "host waits":
            if command[1] is None:
                return not any(self.queues.values())
            return not self.queues.get(command[1])
        if command[0] == "host waits for event":
            record = self.records.get(command[1])
            return record is None or record.end is not None
        return True

    def issue(self, command: Command) -> None:
        if command[0] == "host":
            return
        if "host waits" in command[0]:
            self.entries[-1].end = self.now
            return
        entry = Entry(command)
        self.entries.append(entry)
        self.connect(entry, self.records, self.sends)
        self.queues.setdefault(command[1], []).append(entry)

    def connect(self, entry: Entry, records: dict[Any, Entry], sends: list[Entry]) -> None:
        kind = entry.command[0]
        if kind == "record":
            records[entry.command[2]] = entry
        elif kind == "wait":
            entry.waits_for = records.get(entry.command[2])
        elif kind == "send":
            sends.append(entry)
        elif kind == "receive":
            entry.waits_for = sends[entry.command[2]]
        elif kind == "replay":
            inner_records: dict[Any, Entry] = {}
            inner_sends: list[Entry] = []
            for command in entry.command[2]:
                part = Entry(command)
                self.connect(part, inner_records, inner_sends)
                entry.parts.append(part)
                entry.inside.setdefault(command[1], []).append(part)

    def look_at(self, queues: dict[str, list[Entry]]) -> bool:
        changed = False
        for queue in queues.values():
            if not queue:
                continue
            entry = queue[0]
            if entry.begin is None:
                entry.begin = self.now
                changed = True
            if entry.command[0] == "replay":
                changed |= self.look_at(entry.inside)
            if self.is_over(entry):
                entry.end = self.now
                queue.pop(0)
                changed = True
        return changed

    def is_over(self, entry: Entry) -> bool:
        kind, needed = entry.command[0], entry.waits_for
        if kind == "work":
            return self.now >= entry.begin + entry.command[2]
        if kind == "wait":
            return needed is None or needed.end is not None
        if kind == "receive":
            if needed.begin is None or self.now < needed.begin + needed.command[2]:
                return False
            arrived = needed.begin + needed.command[2]
            return self.now >= max(arrived, entry.begin) + entry.command[3]
        if kind == "replay":
            return not any(entry.inside.values())
        return True


def act(device: Any, streams: dict[str, Any], commands: list[Command], graphs: list[Any] | None = None) -> None:
    """The same commands on a device; `graphs` are those that replays name, in order."""
    events: dict[Any, Any] = {}
    sends: list[Any] = []
    replays = iter(graphs or [])
    for command in commands:
        kind = command[0]
        if kind == "work":
            device.work("work", command[2], stream=streams[command[1]])
        elif kind in ("record", "wait"):
            event = events.setdefault(command[2], None) or device.new_event()
            events[command[2]] = event
            if kind == "record":
                device.record(event, streams[command[1]])
            else:
                device.wait(streams[command[1]], event)
        elif kind == "send":
            sends.append(device.send("send", command[2], stream=streams[command[1]]))
        elif kind == "receive":
            device.receive(sends[command[2]], command[3], stream=streams[command[1]])
        elif kind == "host":
            device.host(command[1])
        elif kind == "host waits":
            if command[1] is None:
                device.synchronize()
            else:
                device.wait_for_host(streams[command[1]])
        elif kind == "host waits for event":
            event = events.setdefault(command[1], None) or device.new_event()
            events[command[1]] = event
            event.synchronize()
        elif kind == "replay":
            next(replays).replay(streams[command[1]])
