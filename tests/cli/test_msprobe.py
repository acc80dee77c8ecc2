"""`rankscope msprobe`: the converters and the anomaly processor with the arguments of msprobe's manual."""

import pytest
from tests.cli.msprobe.conftest import SINGLE, TWO_RANKS

WINDOW = ("Nov21_09-14-24", "Nov21_09-14-24")


@pytest.mark.parametrize("sign", ["-", "_"])
def test_converters_take_the_names_of_the_manual(rankscope, tmp_path, sign):
    names = ("monitor_path", "output_dirpath", "time_start", "time_end", "data_type_list", "process_num")
    values = (str(TWO_RANKS), str(tmp_path), *WINDOW, '["grad_reduced"]', "2")
    options = [
        word for name, value in zip(names, values, strict=True) for word in (f"--{name}".replace("_", sign), value)
    ]
    events = rankscope("msprobe", "csv2tensorboard", *options)
    database = rankscope("msprobe", "csv2db", *options, f"--step{sign}partition", "10")

    assert f"88 rows of 2 ranks; output has been saved to: {tmp_path}\n" == events.stdout, events.stderr
    assert f"88 rows of 2 ranks; output has been saved to: {tmp_path}/monitor_metrics.db\n" == database.stdout
    assert ["monitor_metrics.db", "rank0", "rank1"] == sorted(path.name for path in tmp_path.iterdir())


def test_anomaly_takes_the_options_of_the_manual(rankscope, tmp_path):
    folder = SINGLE / "anomaly_detected"
    done = rankscope("msprobe", "anomaly", "-d", str(folder), "-o", str(tmp_path), "-k", "5", "-s", "[0, 1]")

    assert 6 == done.stdout.count("\n"), done.stderr
    assert (folder / "anomaly_analyse.json").read_text() == (tmp_path / "anomaly_analyse.json").read_text()
