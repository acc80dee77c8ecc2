"""A running service whose receiver refuses every message shows it while the next attempts still follow."""

from __future__ import annotations

import json


async def test_failed_deliveries_are_on_all_pages_of_the_service(serve, start_service, fake_rank, eventually):
    receiver = serve(status=403, text=b"channel is archived")
    url = f"json://127.0.0.1:{receiver.port}/tok3n"
    changes = {"notify.urls": [url], "notify.group_wait_seconds": 0.0}
    async with start_service(**changes) as service, fake_rank() as rank:
        rank.publish(events=[{"type": "anomaly", "severity": "critical", "rule": "AnomalyNan", "tensor": "w"}])
        await rank.register(service.url)

        async def failed() -> str | None:
            found: str | None = json.loads((await service.get("/api/v1/status"))[1])["notifications"]
            return found

        text = await eventually(failed)
        pages = [(await service.get(path))[1] for path in ("/service", "/", "/metrics")]
        receiver.status = 200

    assert text.startswith("1 message waits since ")
    assert text.endswith(f" s: 403 Forbidden: channel is archived (json://127.0.0.1:{receiver.port})")
    assert all("403 Forbidden: channel is archived" in page for page in pages[:2])
    assert 'rankscope_ingest_notification_attempts_total{outcome="failed"}' in pages[2]
    assert not any("tok3n" in page for page in pages)
