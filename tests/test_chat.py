"""refimpl chat: turns, commands, interrupts, files; through a pipe and at a terminal."""

import io
import json
import signal
import sys
from contextlib import closing

import pexpect
import pytest

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.chat import Chat, read_messages
from refimpl.chat_command import ChatTerminal
from refimpl.errors import PromptError, RefimplError
from refimpl.models.tiny import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def engine():
    engine = Engine(EngineArgs(model="tiny", dtype="float64", max_model_len=400))
    yield engine
    engine.close()


@pytest.fixture
def chat(engine):
    engine.reset_prefix_cache()
    return Chat(engine, GREEDY)


def talk(chat, *lines, verbose=False):
    """Type lines through a pipe: (answers, notes, whether a turn failed)."""
    out, notes = io.StringIO(), io.StringIO()
    terminal = ChatTerminal(chat, io.StringIO("".join(f"{line}\n" for line in lines)), out, notes, verbose)
    terminal.run()
    return out.getvalue(), notes.getvalue(), terminal.failed


def expected(engine, messages, params=GREEDY):
    """The answer to a conversation, without a chat."""
    engine.add_request("reference", engine.tokenizer.apply_chat_template(messages), params)
    while True:
        for output in engine.step():
            if output.finished:
                return output.outputs[0].text


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# ---------------------------------------------------------------------- turns


def test_answers_come_in_pieces_and_follow_the_conversation(chat, engine):
    pieces = list(chat.answer("Hello"))
    assert len(pieces) > 3
    first = expected(engine, [user("Hello")])
    assert "".join(pieces) == first
    second = "".join(chat.answer("And?"))
    assert second == expected(engine, [user("Hello"), assistant(first), user("And?")])
    assert chat.messages == [user("Hello"), assistant(first), user("And?"), assistant(second)]


def test_the_next_turn_finds_the_conversation_in_the_prefix_cache(chat):
    list(chat.answer("A question that is long enough for several blocks of sixteen tokens each"))
    list(chat.answer("And another?"))
    first, second = chat.turns
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= first.num_prompt_tokens // 16 * 16
    assert (first.num_output_tokens, first.finish_reason) == (24, "length")
    assert str(second).startswith(
        f"{second.num_prompt_tokens} prompt tokens, {second.num_cached_tokens} of them cached; first"
    )


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(chat, engine):
    pieces = []
    for piece in chat.answer("Hello"):
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)
    assert pieces == list(Chat(engine, GREEDY).answer("Hello"))[:3]
    assert chat.messages == [user("Hello"), assistant("".join(pieces))]
    assert chat.turns[0].finish_reason is None
    assert not engine.has_unfinished_requests()
    assert engine.audit() == []
    assert "".join(chat.answer("And?")) == expected(engine, [*chat.messages[:2], user("And?")])


def test_ctrl_c_before_the_first_token_forgets_the_question(chat, engine):
    answer = chat.answer("Hello")
    real, engine.step = engine.step, lambda: signal.raise_signal(signal.SIGINT) or []
    try:
        assert list(answer) == []
    finally:
        engine.step = real
    assert chat.messages == []
    assert not engine.has_unfinished_requests()


def test_an_answer_that_nobody_wants_to_the_end_is_aborted(chat, engine):
    answer = chat.answer("Hello")
    piece = next(answer)
    answer.close()
    assert not engine.has_unfinished_requests()
    assert chat.messages == [user("Hello"), assistant(piece)]


def test_a_conversation_beyond_the_context_says_so_and_goes_on(chat):
    long = "x" * 380
    answers, notes, failed = talk(chat, long, "/stats", "more", "/reset", "Hello")
    assert "the conversation fills the context of 400 tokens; /reset begins anew" in notes
    assert "max_model_len" in notes
    assert "/reset begins a new conversation, /save FILE keeps this one" in notes
    assert failed
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["Hello"]
    assert answers.count("\n") >= 2
    assert len(chat.turns) == 2


def test_a_refused_question_leaves_the_conversation_as_it_was(chat):
    list(chat.answer("Hello"))
    before = list(chat.messages)
    with pytest.raises(PromptError, match="400"):
        list(chat.answer("y" * 500))
    assert chat.messages == before


def test_a_model_without_template_is_refused():
    letters = Engine(EngineArgs(model=tiny(vocab_size=12), num_gpu_blocks_override=8))
    with closing(letters), pytest.raises(RefimplError, match=r"no chat template.*instruct model"):
        Chat(letters, GREEDY)


def test_a_step_that_fails_is_told_and_the_chat_goes_on(chat, engine, monkeypatch, caplog):
    runner = engine.executor.runner

    def fail(*_):
        raise ValueError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "launch", fail)
        _, notes, failed = talk(chat, "Hello")
    assert "the step failed: ValueError('the device is gone')" in notes
    assert failed
    assert chat.messages == []
    assert "".join(chat.answer("Hello")) == expected(engine, [user("Hello")])


# ---------------------------------------------------------------------- commands


def test_through_a_pipe_only_answers_are_on_standard_output(chat, engine):
    answers, notes, failed = talk(chat, "Hello", "", "  ", "/help", "/exit", "never read")
    assert answers == expected(engine, [user("Hello")]) + "\n"
    assert "/save FILE" in notes
    assert "\x1b" not in notes
    assert not failed
    assert len(chat.turns) == 1


def test_a_system_message_leads(chat, engine):
    system = {"role": "system", "content": "Be brief."}
    talk(chat, "/system Be brief.", "Hello", "/system")
    assert chat.messages[0] == system
    assert chat.messages[2]["content"] == expected(engine, [system, user("Hello")])
    _, notes, _ = talk(chat, "/system Be loud.", "/reset", "/system", "/system -", "/system")
    assert notes.splitlines() == [
        "system message: Be loud.",
        "a new conversation",
        "system message: Be loud.",
        "system message: none",
        "system message: none",
    ]
    assert chat.messages == []


def test_a_saved_conversation_is_loaded_back(chat, engine, tmp_path):
    file = tmp_path / "talk.json"
    _, notes, failed = talk(chat, "/system Be brief.", "Grüße 🙂", f"/save {file}", f"/save {file}")
    assert (notes.count(f"3 messages in {file}"), failed) == (2, False)
    assert json.loads(file.read_text(encoding="utf-8")) == chat.messages
    other = Chat(engine, GREEDY)
    talk(other, f"/load {file}", "And?")
    assert other.messages[:3] == chat.messages
    assert other.messages[4]["content"] == expected(engine, other.messages[:4])


@pytest.mark.parametrize("content", ["notes of mine", "{}", '{"a": 1}', "[1]", '[{"role": "user"}]'])
def test_a_file_that_holds_no_conversation_is_neither_loaded_nor_overwritten(chat, tmp_path, content):
    file = tmp_path / "mine.json"
    file.write_text(content)
    _, notes, failed = talk(chat, f"/save {file}", f"/load {file}")
    assert "is there and holds no conversation" in notes
    assert failed
    assert file.read_text() == content
    with pytest.raises(RefimplError, match=r"mine\.json"):
        read_messages(file)


def test_messages_within_an_object_are_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"messages": [user("Hi")]}))
    assert read_messages(tmp_path / "a.json") == [user("Hi")]


def test_wrong_commands_are_told(chat, tmp_path):
    _, notes, failed = talk(chat, "/nope", "/save", "/load", f"/load {tmp_path / 'none'}", f"/save {tmp_path / 'no' / 'x'}")
    assert failed
    said = notes.splitlines()
    assert said[0].startswith("there is no command /nope; /help lists them")
    assert said[1:3] == ["/save needs the name of a file", "/load needs the name of a file"]
    assert said[3].startswith("no conversation can be read from")
    assert said[4].startswith("the conversation cannot be written to")
    assert chat.turns == []


@pytest.mark.parametrize("name", ["~nobody-of-that-name/talk", "a\0b"])
def test_a_name_that_no_file_can_have_does_not_end_the_chat(chat, name):
    answers, notes, failed = talk(chat, f"/save {name}", f"/load {name}", "Hello")
    assert failed
    assert "the conversation cannot be written to" in notes
    assert "no conversation can be read from" in notes
    assert answers


def test_two_slashes_send_one(chat):
    talk(chat, "//etc")
    assert chat.messages[0] == user("/etc")


def test_stats_tell_tokens_and_times(chat):
    _, notes, _ = talk(chat, "/stats", "A first question with some more tokens", "And?", "/stats", verbose=True)
    lines = notes.splitlines()
    assert lines[0] == "nothing was asked yet"
    assert lines[-2] == f"last turn: {chat.turns[1]}"
    cached = chat.turns[1].num_cached_tokens
    assert cached > 0
    assert lines[-1].startswith("all 2 turns: ")
    assert f"{cached} of them cached; 48 tokens generated" in lines[-1]
    assert str(chat.turns[0]) in lines


def test_an_output_that_cannot_hold_a_character_gets_a_question_mark(chat):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    ChatTerminal(chat, io.StringIO("Hello\n"), out, io.StringIO()).run()
    out.flush()
    assert out.buffer.getvalue().decode("ascii").endswith("\n")


# ---------------------------------------------------------------------- as a process


def test_the_command_line(monkeypatch, capsys, tmp_path, engine):
    from refimpl.cli import main

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["refimpl", "chat", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    file = tmp_path / "talk.json"
    options = ["tiny", "--dtype", "float64", "--temperature", 0, "--max-tokens", 24]
    code, out, err = run(*options, "--system", "Be brief.", stdin=f"Hello\n/save {file}\n")
    answer = expected(engine, [{"role": "system", "content": "Be brief."}, user("Hello")])
    assert (code, out) == (0, answer + "\n")
    code, out, err = run(*options, "--load", file, "--verbose", stdin="And?")
    assert out == expected(engine, [*read_messages(file), user("And?")]) + "\n"
    assert "prompt tokens" in err
    assert run(*options, stdin="/nope\n")[0] == 1
    code, out, err = run(*options, "--load", tmp_path / "none")
    assert (code, out) == (2, "")
    assert err.startswith("refimpl: no conversation can be read from")
    code, out, err = run(*options, "--top-p", 7)
    assert code == 2
    assert "top_p is 7.0" in err


@pytest.fixture
def terminal():
    """``refimpl chat`` at a pseudo-terminal."""
    command = ["-c", "from refimpl.cli import main; main()", "chat", "tiny", "--temperature", "0", "--max-tokens", "1500"]
    child = pexpect.spawn(sys.executable, command, timeout=280, encoding="utf-8", codec_errors="replace")
    yield child
    child.close(force=True)


def test_at_a_terminal(terminal):
    terminal.expect("Ctrl-D ends")
    terminal.expect("> ")
    terminal.sendline("Hi there")
    terminal.expect("Hi there\r\n.{4}")  # the echo, and an answer under way
    terminal.sendintr()
    terminal.expect("interrupted; what was said stays in the conversation")
    terminal.expect("> ")
    terminal.sendintr()  # with nothing under way
    terminal.expect("Ctrl-D or /exit ends the chat")
    terminal.expect("> ")
    terminal.send("\x1b[A")  # the line of before
    terminal.expect("Hi there")
    terminal.send("\x15/stats\r")
    terminal.expect("all 1 turns: 11 prompt tokens")
    terminal.expect("> ")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0
