"""When a run is to end: what counts as a wish, as a second one, and what every rank makes of it."""

import contextlib
import os
import signal
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import megalith.launch.signals as signals
from megalith.config import ParallelConfig, TrainConfig
from megalith.launch.agent import Agent
from megalith.launch.failure import CRASH_FILE
from megalith.launch.in_process import IN_PROCESS, RESIZES
from megalith.launch.peer_watch import CONNECTED_FILE
from megalith.launch.rendezvous import SingleNodeRendezvous
from megalith.launch.signals import STOP_SIGNALS, StopSignals, handled_stop_signals
from megalith.launch.stops import EXIT_CODES, STOP_CODE_FILE, STOP_REASONS, Stops
from megalith.parallel.gather import ALONE
from megalith.parallel.mesh import build_mesh


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("megalith.launch.stops.time", clock)
    monkeypatch.setattr("megalith.launch.signals.time", clock)
    return clock


def test_exit_duration_is_in_minutes_and_counts_from_the_start(clock):
    stops = Stops(TrainConfig(exit_duration_in_mins=2), ALONE)
    clock.now += 119
    assert stops.after_step(1) is None
    clock.now += 2
    assert stops.after_step(2) == stops.stop_reason == "exit_duration_in_mins"


def test_an_exit_interval_is_no_hurry():
    stops = Stops(TrainConfig(exit_interval=3), ALONE)
    assert [stops.after_step(step) for step in (2, 3, 4)] == [None, "exit_interval", None]
    assert stops.stop_reason is None


def test_every_signal_has_an_exit_code_and_a_place_among_the_wishes():
    names = {number.name for number in STOP_SIGNALS}
    assert names <= EXIT_CODES.keys() and names <= set(STOP_REASONS)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)


class Left(BaseException):
    pass


@pytest.fixture
def take(clock, monkeypatch):
    """Lets signals come: `take(stop_signals, SIGTERM, seconds since the one before)`; Left where the process goes."""

    def leave(code):
        raise Left(code)

    def take(stop_signals, number, later=0.0):
        clock.now += later
        stop_signals._handle(number)

    monkeypatch.setattr(signals.os, "_exit", leave)
    return take


def test_a_second_sigterm_counts_only_when_the_loop_has_acted_on_the_first(take):
    """It may reach a rank directly and, seconds later, through its launcher, in the midst of one long step."""
    came = StopSignals()
    stops = Stops(TrainConfig(), ALONE, came)
    take(came, signal.SIGTERM)
    take(came, signal.SIGTERM, later=5)
    assert stops.after_step(1) == "SIGTERM"
    with pytest.raises(Left, match="143"):
        take(came, signal.SIGTERM, later=0.1)


def test_a_rank_that_stops_for_another_ones_signal_takes_its_own_first_for_the_same_wish(take):
    came = StopSignals()
    came.acknowledge()  # the ranks have agreed
    take(came, signal.SIGTERM, later=3)
    take(came, signal.SIGTERM, later=3)


def test_a_second_sigint_counts_at_once_for_the_user_has_been_told(take, capsys):
    came = StopSignals()
    take(came, signal.SIGINT)
    assert capsys.readouterr().err == "SIGINT: stopping after this step, with a checkpoint; again: at once\n"
    take(came, signal.SIGINT, later=0.5)
    with pytest.raises(Left, match="130"):
        take(came, signal.SIGINT, later=0.6)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_second_sigusr1_or_sighup_changes_nothing(take, number, capsys):
    came = StopSignals()
    stops = Stops(TrainConfig(), ALONE, came)
    take(came, number)
    assert stops.after_step(1) == number.name
    take(came, number, later=60)
    assert stops.after_step(2) == number.name
    assert capsys.readouterr().err.count("stopping after this step") == 1


def test_a_signal_while_the_processes_find_each_other_ends_this_one_for_no_step_may_ever_come(take, capsys):
    came = StopSignals()
    with pytest.raises(Left, match="143"), came.during_rendezvous():
        take(came, signal.SIGTERM)
    assert "before the processes of the run had found each other" in capsys.readouterr().err
    take(came, signal.SIGTERM)  # they have: it is the first wish of a run that trains
    with pytest.raises(Left, match="143"), came.during_rendezvous():
        raise AssertionError("what was asked before counts too")


def test_only_the_first_rank_announces(take, capsys):
    take(StopSignals(announces=False), signal.SIGTERM)
    assert capsys.readouterr().err == ""


@contextlib.contextmanager
def handled(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_signals_are_heeded_and_what_nohup_has_a_process_ignore_stays_ignored(capsys):
    with handled(signal.SIGHUP, signal.SIG_IGN):
        assert signal.SIGHUP not in handled_stop_signals() and signal.SIGTERM in handled_stop_signals()
        with StopSignals() as came:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert came.received is signal.SIGUSR1 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with handled(signal.SIGHUP, signal.SIG_DFL), StopSignals() as came:
        os.kill(os.getpid(), signal.SIGHUP)
    assert came.received is signal.SIGHUP


@pytest.mark.parametrize("heeds", [True, False], ids=["", "nohup"])
def test_a_launcher_hands_on_the_signals_that_it_heeds_though_elastic_takes_them_all(
    monkeypatch, tmp_path, heeds
):
    elastic = LocalElasticAgent
    for name in (STOP_CODE_FILE, CRASH_FILE, CONNECTED_FILE):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in (IN_PROCESS, RESIZES):  # which the agent sets for its workers
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(elastic, "__init__", lambda self, *given: None)
    monkeypatch.setattr(
        elastic, "_start_workers", lambda *given: [signal.signal(signal.SIGHUP, print), {}][1]
    )
    with contextlib.ExitStack() as before:
        for number in STOP_SIGNALS:
            before.enter_context(handled(number, signal.getsignal(number)))
        signal.signal(signal.SIGHUP, signal.SIG_DFL if heeds else signal.SIG_IGN)
        spec = SimpleNamespace(local_world_size=1, rdzv_handler=SingleNodeRendezvous())
        agent = Agent(spec, None)
        agent._remaining_restarts = 0  # of torch's agent, whose constructor the test replaces
        alone = dict(spec=spec, store=None, group_rank=0, group_world_size=1)
        agent._start_workers(SimpleNamespace(workers=[SimpleNamespace(world_size=1)], **alone))
        assert signal.getsignal(signal.SIGHUP) == (agent._forward_signal if heeds else signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == agent._forward_signal


def agreed(wishes: list[int]) -> list:
    """What a rank reads, whose own wish is that of its place in `wishes`, and whether it knows that it obeys."""
    world = build_mesh(ParallelConfig(), len(wishes), "cpu").world
    came, rank = StopSignals(announces=False), world.rank
    stops = Stops(TrainConfig(), world, came)
    said = []
    for round_ in range(2):  # the wishes come after the head of the first
        stops.before_work()
        if round_ == 0 and wishes[rank]:
            came._handle(signal.Signals(wishes[rank]))
        said.append(stops.after_work())
    return [*said, came._acknowledged_at is not None]


def test_all_ranks_agree_on_the_wish_that_counts_most(pool):
    wishes = [0, signal.SIGINT, signal.SIGTERM, 0]
    assert pool.run(agreed, wishes) == [[None, "SIGTERM", True]] * 4
