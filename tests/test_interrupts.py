"""Ctrl-C between steps: taken when asked for, never dropped, and the handler of before is back."""

import signal

import pytest

from refimpl.interrupts import interrupts_between_steps


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_is_back():
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted(block):
    """The KeyboardInterrupt that comes out of a guarded block."""

    def run():
        with interrupts_between_steps() as check:
            block(check)

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    return caught.value


def test_it_waits_for_the_check():
    passed = []

    def block(check):
        check()
        press()
        passed.append(1)
        check()
        passed.append(2)

    interrupted(block)
    assert passed == [1]


def test_one_that_nobody_took_is_raised_at_the_end():
    interrupted(lambda check: press())


def test_it_is_not_dropped_when_the_block_raises_something_else():
    def block(check):
        press()
        raise ZeroDivisionError

    assert isinstance(interrupted(block).__cause__, ZeroDivisionError)


def test_one_that_was_taken_is_not_raised_again():
    with interrupts_between_steps() as check:
        press()
        with pytest.raises(KeyboardInterrupt):
            check()
        check()


def test_an_inner_block_has_the_same_flag():
    def block(check):
        with interrupts_between_steps():
            press()
        check()
        raise AssertionError("it was dropped")

    interrupted(block)


def test_a_second_one_goes_through_at_once():
    passed = []

    def block(check):
        press()
        passed.append(1)
        press()
        passed.append(2)

    interrupted(block)
    assert passed == [1]
