"""The interference figures: window rules, medians, the report's shape and its picture."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from cluster.bench.arms import default_config, make_arms, parse_budgets
from cluster.bench.picture import page
from cluster.bench.progress import StartLines
from cluster.bench.quiet import busy_share
from cluster.bench.report import as_json, conclusion, table
from cluster.bench.results import ArmResult, Run, Stream, Workload
from cluster.bench.windows import (
    MIN_GAPS_FOR_P99,
    WINDOWS,
    Gaps,
    Marks,
    median_gaps,
    output_rate,
    percentile,
    sort_gaps,
    summarize,
)
from cluster.control.readiness import Progress, Step, StepState
from protocol.errors import InvalidArgument
from protocol.types import Mode

MARKS = Marks(warm=1.0, submit=10.0, second=20.0)


@pytest.mark.parametrize(
    ("arrivals", "window", "gap_ms"),
    [
        ([2.0, 3.0], "before", 1000),
        ([1.0, 2.0], "before", 1000),
        ([9.0, 10.0], "before", 1000),  # ends at the submit: does not overlap
        ([9.5, 10.5], "during", 1000),
        ([9.0, 30.0], "during", 21000),  # overlaps everything: counts once, whole
        ([19.5, 25.0], "during", 5500),
        ([20.0, 21.0], "after", 1000),
    ],
)
def test_a_gap_belongs_to_one_window(arrivals, window, gap_ms):
    found = sort_gaps([arrivals], MARKS)
    assert {k: v for k, v in found.items() if v} == {window: [pytest.approx(gap_ms)]}


def test_gaps_that_began_before_all_chats_were_warm_belong_to_none():
    assert not any(sort_gaps([[0.2, 0.8, 1.2]], MARKS).values())


def test_every_later_gap_is_counted_exactly_once():
    arrivals = [1.0 + 0.25 * i for i in range(120)]
    found = sort_gaps([arrivals, arrivals], MARKS)
    assert sum(len(v) for v in found.values()) == 2 * 119


def test_percentile_interpolates_between_neighbours():
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 99) == pytest.approx(9.9)
    assert percentile([7], 99) == 7


def test_p99_needs_enough_gaps():
    assert summarize([1.0] * (MIN_GAPS_FOR_P99 - 1)).p99 is None
    assert summarize([1.0] * MIN_GAPS_FOR_P99).p99 == 1.0
    assert summarize([]) == Gaps(0, None, None, None)


def test_medians_over_repeats_and_a_p99_only_where_every_repeat_has_one():
    runs = [Gaps(3, 1.0, 8.0, 5.0), Gaps(3, 3.0, 9.0, 7.0), Gaps(5, 2.0, 10.0, 6.0)]
    assert median_gaps(runs) == Gaps(3, 2.0, 9.0, 6.0)
    runs[0] = Gaps(3, 1.0, None, 5.0)
    assert median_gaps(runs) == Gaps(3, 2.0, None, 6.0)
    assert median_gaps([Gaps(0, None, None, None)]) == Gaps(0, None, None, None)


def test_rate_counts_only_the_measured_time():
    assert output_rate([[0.5, 1.5, 2.0, 9.0]], MARKS, end=5.0) == pytest.approx(2 / 4)


def a_run(freeze_s: float) -> Run:
    """Two chats at 10 tokens/s that stop for ``freeze_s`` when a long prompt comes at 10 s."""
    steady = [0.1 * i for i in range(100)]
    second = 10.0 + freeze_s
    chat = steady + [second + 0.1 * i for i in range(50)]
    chats = tuple(Stream(f"chat {i}", 0.0, list(chat)) for i in (1, 2))
    long = Stream("long <prompt>", 10.0, [second - 0.1, second])
    return Run(chats, long, Marks(1.0, 10.0, second), end=second + 4.9)


@pytest.fixture
def results(tmp_path):
    arms = make_arms(default_config(tmp_path), 2, (64, 256))
    freezes = {"naive": (6.0, 8.0, 7.0), "disaggregated": (0.2, 0.2, 0.2)}
    return [
        ArmResult(arm, tuple(a_run(f) for f in freezes.get(arm.name, (1.0, 1.0, 1.0))))
        for arm in arms
    ]


def test_arms_use_the_same_cores_in_different_ways(results):
    by_name = {r.arm.name: r.arm for r in results}
    assert list(by_name) == ["naive", "chunked-64", "chunked-256", "disaggregated"]
    assert {sum(arm.threads_per_worker) for arm in by_name.values()} == {2}
    assert by_name["naive"].config.chunked_prefill is False
    assert by_name["chunked-64"].config.pools.decode.max_num_batched_tokens == 64
    assert by_name["disaggregated"].config.mode is Mode.DISAGGREGATED
    assert by_name["disaggregated"].workers == 2


def test_bad_arms_are_refused_with_the_numbers(tmp_path):
    with pytest.raises(InvalidArgument, match=r"budget 20 .* 16 .* 32"):
        make_arms(default_config(tmp_path), 2, (20,))
    with pytest.raises(InvalidArgument, match="cores 1"):
        make_arms(default_config(tmp_path), 1, (64,))
    with pytest.raises(InvalidArgument, match="'x' is not a whole number"):
        parse_budgets("64,x")


def test_report_has_the_documented_fields_and_medians(results):
    report = json.loads(json.dumps(as_json(results, Workload())))
    naive = report["arms"][0]
    assert {"name", "budget", "workers", "threads", "long_ttft_ms", "output_tok_s"} <= set(naive)
    assert naive["chat_itl_ms"]["during"]["max"] == pytest.approx(7100, abs=1)
    assert naive["chat_itl_ms"]["before"] == {"p50": 100.0, "p99": None, "max": 100.0}
    assert naive["long_ttft_ms"] == pytest.approx(6900, abs=1)
    assert naive["longest_gap_ms_per_repeat"] == [6100.0, 8100.0, 7100.0]


def test_conclusion_says_both_sides(results):
    text = " ".join(conclusion(results))
    assert "7100 ms naive, 300 ms disaggregated (23.7 x)" in text
    assert "best budget here (64)" in text
    assert "Doubt" not in text


def test_conclusion_names_every_arm_that_beats_ours_and_a_disturbed_machine(results):
    slow = ArmResult(results[-1].arm, (a_run(1.5),), foreign_load=0.6)
    text = " ".join(conclusion([*results[:-1], slow]))
    assert "longest silence (chunked-64)" in text
    assert "first token of the long prompt (chunked-64)" in text
    assert "other programs used 60% of this machine's cores" in text


def test_busy_share_is_read_from_the_processor_ticks(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 100 700 100 0 0 0 0 0\n")
    quarter = "cpu 120 0 130 850 100 0 0 0 0 0\n"  # 50 of 200 ticks were busy
    assert busy_share(stat, lambda _: stat.write_text(quarter)) == pytest.approx(0.25)
    assert busy_share(tmp_path / "none", lambda _: None) is None


def test_a_start_speaks_when_a_step_is_ready_and_while_it_waits():
    said, now = [], [0.0]
    lines = StartLines(said.append, each=True, clock=lambda: now[0])
    loading = Step("decode-0", StepState.LOADING)
    lines.show(Progress((loading, Step("links", StepState.WAITING))))
    now[0] = 6.0
    lines.show(Progress((loading,)))
    lines.show(Progress((Step("decode-0", StepState.READY),)))
    lines.show(Progress((Step("decode-0", StepState.READY),)))
    assert said == ["waiting for decode-0 (loading)", "decode-0 is ready"]


def test_table_is_whole_in_80_columns(results, monkeypatch):
    monkeypatch.setattr(ArmResult, "gaps", lambda _: dict.fromkeys(WINDOWS, Gaps(9, 1e3, 2e3, 3e3)))
    out = io.StringIO()
    Console(file=out, width=80).print(table(results))
    assert "…" not in out.getvalue()
    assert out.getvalue().count("1000/2000/3000") == 3 * len(results)


class Outline(HTMLParser):
    """Checks that tags nest and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "rect", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_picture_is_one_well_formed_file_with_a_tick_per_token(results):
    report = as_json(results, Workload())
    document = page(results, report, conclusion(results), "tandem bench interference")
    outline = Outline()
    outline.feed(document)
    assert not outline.open
    assert "long <prompt>" in outline.text  # escaped in the source
    assert not re.search(r"(src|href)=|https?://", document)
    rows = re.findall(r"<path d='([^']*)' stroke='var\(--(chat|long)\)'", document)
    assert len(rows) == len(results) * 3
    shown = sum(1 for t in results[0].typical_run().chats[0].arrivals if t >= 1.0)
    assert rows[0][0].count("M") == shown
    embedded = re.search(r"id='report'>(.*?)</script>", document, re.S)
    assert json.loads(embedded[1]) == report
