"""A script that logs its own metrics, from its steps to the open page of the run, the store and the commands."""

import json
from pathlib import Path

from tests.programs import run_command
from tests.view.browser import browser

from rankscope_storage.connection import connect

TRAINING = Path(__file__).with_name("small_training.py")


def shown(name):
    """Return an expression: the text of the panel of a metric with a drawn chart."""
    named = f"JSON.parse(one.querySelector('.plot').dataset.chart).name === {json.dumps(name)}"
    return f"[...document.querySelectorAll('.metric:has(.uplot)')].find((one) => {named})?.innerText"


def test_own_metrics_are_on_the_page_while_the_run_is_live(service, start_job, tmp_path, require_server):
    service.start()
    training = start_job(TRAINING, tmp_path, 0, 0.02, RANKSCOPE_RUN="own")
    service.wait_for(lambda: service.get("/runs/own"))
    with browser(require_server("chromium"), tmp_path / "profile") as page:
        page.look(1280, 3000)
        page.open(f"{service.url}/runs/own")
        page.wait(f"({shown('my_metric')} ?? '').match(/raw/)")
        page.wait("document.querySelector('#chart-eval_loss')?.innerText.includes('logged as val/loss')")
        page.wait(f"!!{shown('val/accuracy')}")
        page.wait(f"({shown('acc')} ?? '').includes('key top5')")
        assert not page.run(shown("late/bleu"))
        (tmp_path / "late").touch()

        page.wait(f"({shown('late/bleu')} ?? '').includes('7.25')")
        assert "late" in page.run(
            "[...document.querySelectorAll('#metrics summary')].map((one) => one.innerText).join()"
        )
        names = page.run("[...document.querySelectorAll('.metric h2')].map((one) => one.textContent)")
        assert len(set(names)) == len(names)
        (tmp_path / "stop").touch()
        assert 0 == training.wait(60)
        assert [] == page.problems
    assert 0 == service.stop()

    with connect(service.store) as connection:
        rows = connection.query("SELECT step, value, labels FROM scalars WHERE name = 'eval_loss'").to_pylist()
        assert all(row["value"] == 3 / row["step"] for row in rows)
        assert {'{"source_name":"val/loss"}'} == {row["labels"] for row in rows}
    steps = len(rows)
    printed = run_command("summary", "own", "--store", str(service.store)).stdout
    assert f"my_metric: {2 * steps:.6f} at step {steps}; lowest 2.000000 at step 1" in printed
    assert "late/bleu: 7.250000" in printed
