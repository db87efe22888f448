"""``guide doctor``."""

from __future__ import annotations

from cli.options import Session, command
from cli.output import escape, say, say_json
from guidance.errors import MachineError


@command(
    "doctor",
    group="Help",
    examples=["guide doctor", "guide doctor --json | jq '.findings[] | select(.state==\"bad\")'"],
)
def doctor(session: Session) -> None:
    """Check versions, extras, language models, devices and the store."""
    from pipelines.tools.doctor import examine

    findings = examine(session.store)
    bad = [finding for finding in findings if finding.state == "bad"]
    if session.json:
        say_json({"schema": 1, "ok": not bad, "findings": [finding.as_dict() for finding in findings]})
    else:
        topic = None
        for finding in findings:
            if finding.topic != topic:
                topic = finding.topic
                say(topic)
            mark = {"ok": "ok ", "absent": " - ", "bad": "BAD"}[finding.state]
            say(f"  {mark}  {escape(finding.name):<18} {escape(finding.detail)}")
    if bad:
        raise MachineError(
            f"{len(bad)} problem{'s' if len(bad) > 1 else ''} found",
            hint="\n".join(f"{finding.name}: {finding.detail}" for finding in bad),
        )
