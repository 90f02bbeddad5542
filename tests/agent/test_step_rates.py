"""Steps of workers for people and Prometheus: counts, times since the last step, and steps per second."""

from __future__ import annotations

from dataclasses import replace

from elastirun.agent.observe.step_rates import WINDOW, StepRates, WorkerSteps
from elastirun.worker.progress_page import NS, Page


def page(steps: int, stamped: float, pid: int = 7) -> Page:
    return Page(pid, 0, steps, int(stamped * NS), 0, 0)


class Asked:
    """Asks for the steps of one worker, with the clock of its stamps 1000 s behind that of the agent."""

    def __init__(self) -> None:
        self.rates = StepRates()

    def at(self, seconds: float, worker: Page) -> WorkerSteps:
        (found,) = self.rates.look(seconds + 1000, int(seconds * NS), {0: worker}, {0: 4})
        return found

    def rate(self, seconds: float, worker: Page) -> float | None:
        return self.at(seconds, worker).steps_per_second


def test_of_each_worker_that_stamps_the_steps_are_shown() -> None:
    pages = {1: page(3, 8.0), 0: page(4, 9.5), 2: page(0, 0.0)}
    shown = StepRates().look(0.0, 10 * NS, pages, {0: 4, 1: 5, 2: 6, 3: 7})
    assert shown == (WorkerSteps(4, 0, 4, 0.5, None), WorkerSteps(5, 1, 3, 2.0, None))


def test_a_stamp_of_the_future_is_no_negative_time() -> None:
    assert Asked().at(10.0, page(1, 11.0)).seconds_since_step == 0


def test_a_rate_is_counted_from_stamp_to_stamp_whenever_somebody_asks() -> None:
    asked = Asked()
    assert asked.rate(10.0, page(5, 9.0)) is None
    assert asked.rate(10.1, page(5, 9.0)) is None, "one step tells nothing yet"
    assert asked.rate(19.9, page(9, 19.0)) == 0.4
    assert asked.rate(20.0, page(9, 19.0)) == 0.4


def test_a_rate_is_that_of_the_last_minute_or_since_the_question_before() -> None:
    asked = Asked()
    for second in range(200):
        rate = asked.rate(float(second), page(1 + second if second < 100 else 100 + 10 * (second - 99), second))
        assert rate == (None if second == 0 else 1.0 if second < 100 else rate)
    assert rate == 10.0
    assert asked.rate(1000.0, page(1100 + 400, 999.0)) == 0.5, "400 steps in 800 s"


def test_a_worker_that_makes_no_step_for_a_minute_has_the_rate_zero() -> None:
    asked = Asked()
    rates = [asked.rate(float(second), page(min(second, 30) + 1, min(second, 30))) for second in range(130)]
    assert set(rates[1 : 30 + int(WINDOW)]) == {1.0} and set(rates[30 + int(WINDOW) :]) == {0.0}


def test_a_new_round_begins_anew() -> None:
    asked = Asked()
    asked.at(0.0, page(5, 0.0))
    assert asked.rate(5.0, page(9, 5.0, pid=8)) is None, "another process"
    assert asked.rate(6.0, page(2, 6.0, pid=8)) is None, "a pid that came again"
    assert asked.rate(7.0, page(4, 7.0, pid=8)) == 2.0
    assert asked.rates.look(8.0, 0, {}, {}) == ()
    assert asked.rate(9.0, page(8, 9.0, pid=8)) is None, "it had ended"


def test_a_live_worker_that_counts_anew_in_the_next_round_has_no_rate_of_two_rounds() -> None:
    """It keeps its process, and may have made more steps in this round than in the last one when somebody asked then."""
    asked = Asked()

    def made(steps: int, stamped: float, first: float) -> Page:
        return replace(page(steps, stamped), first=int(first * NS))

    asked.at(10.0, made(49, 10.0, first=5.0))
    assert asked.rate(31.0, made(58, 31.0, first=25.0)) is None
    assert asked.rate(33.0, made(76, 33.0, first=25.0)) == 9.0


def test_however_many_ask_few_samples_are_kept() -> None:
    asked = Asked()
    for tenth in range(3000):
        asked.at(tenth / 10, page(tenth + 1, tenth / 10))
    assert len(asked.rates._samples[0]) <= WINDOW + 2


def test_nonsense_in_a_page_does_no_harm() -> None:
    asked, most = Asked(), (1 << 64) - 1
    asked.at(0.0, Page(1, 0, 1, most, 0, 0))
    assert asked.rate(5.0, Page(1, 0, most, 1, most, most)) is None
