"""Our executor under AutoGen's interface; AutoGen has no suite for executors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import CodeExecutorAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock

from ringfence.integrations.autogen import OUTPUT_BYTES, RingfenceCodeExecutor
from tests.suites import at_once, imports, left
from tests.suites.examples import output_of
from tests.suites.places import options
from tests.suites.remote import serving


async def run(executor: RingfenceCodeExecutor, *blocks: tuple[str, str]) -> tuple[int, str]:
    wanted = [CodeBlock(code=code, language=language) for language, code in blocks]
    result = await executor.execute_code_blocks(wanted, CancellationToken())
    return result.exit_code, result.output


async def test_blocks_until_one_fails() -> None:
    async with RingfenceCodeExecutor(timeout_s=8, **options()) as executor:
        both = await run(executor, ("sh", "echo one > a"), ("python", "print(open('a').read())"))
        failed = await run(executor, ("sh", "exit 3"), ("sh", "echo never"))
        late = await run(executor, ("bash", "setsid sleep 4395 & wait"))
        gone = await run(executor, ("sh", left.look(4395)))
        await executor.restart()
        fresh = await run(executor, ("sh", "cat a"))
        with pytest.raises(ValueError, match="cobol"):
            await run(executor, ("cobol", "STOP RUN."))

    assert ((0, "one\n\n"), (3, ""), (0, "none\n")) == (both, failed, gone)
    assert (124, True) == (late[0], "Timeout: timed out after" in late[1])
    assert 1 == fresh[0]


async def test_cancelled_it_leaves_no_process() -> None:
    async with RingfenceCodeExecutor(**options()) as executor:
        token = CancellationToken()
        block = CodeBlock(code="echo > began; setsid sleep 4396 & wait", language="sh")
        task = asyncio.create_task(executor.execute_code_blocks([block], token))
        while (await run(executor, ("sh", "test -e began")))[0]:
            await asyncio.sleep(0.01)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while "none\n" != (await run(executor, ("sh", left.look(4396))))[1]:
            await asyncio.sleep(0.01)


async def test_blocks_are_files_with_names_of_their_own() -> None:
    """As with AutoGen's own executors, and however long they are."""

    async def result(code: str, language: str = "python") -> Any:
        return await executor.execute_code_blocks([CodeBlock(code, language)], CancellationToken())

    async with RingfenceCodeExecutor(**options()) as executor:
        named = await result("# filename: sub/helper.py\nVALUE = 42")
        used = await result("from sub.helper import VALUE\nprint(VALUE)")
        long = await result(f"text = '{'x' * 300_000}'\nprint(len(text))")
        outside = [await result(f"# filename: {name}\n1") for name in ("../a.py", "/etc/a", "")]
        fixed = ["/usr/lib:/work"]
        async with RingfenceCodeExecutor(**options(mounts=fixed, workdir="/work")) as reader:
            read_only = await run(reader, ("python", "print(1)"))

    assert (0, "sub/helper.py") == (named.exit_code, named.code_file)
    assert ("42\n", True) == (used.output, used.code_file.startswith("tmp_code_"))
    assert "300000\n" == long.output
    assert [(1, "Filename is not in the workspace")] * 3 == [
        (each.exit_code, each.output) for each in outside
    ]
    assert (0, "1\n") == read_only


async def test_an_agents_loop() -> None:
    """AutoGen's own agent: a block that takes too long, one that is cancelled, one that says what is left."""

    def says(code: str) -> list[TextMessage]:
        return [TextMessage(content=f"```sh\n{code}\n```", source="model")]

    async with RingfenceCodeExecutor(timeout_s=3, **options()) as executor:
        agent = CodeExecutorAgent("worker", code_executor=executor)
        late = await agent.on_messages(says("setsid sleep 4397 & wait"), CancellationToken())
        token = CancellationToken()
        cancelled = asyncio.create_task(
            agent.on_messages(says("echo > begun; setsid sleep 4398 & wait"), token)
        )
        while (await run(executor, ("sh", "test -e begun")))[0]:
            await asyncio.sleep(0.01)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for seconds in (4397, 4398):
            found = await agent.on_messages(says(left.look(seconds)), CancellationToken())
            assert "none" == found.chat_message.to_text().strip()

    assert "Timeout" in late.chat_message.to_text()


async def test_too_much_output_is_cut_and_says_so() -> None:
    async with RingfenceCodeExecutor(**options()) as executor:
        whole = await run(executor, ("python", f"print('x' * {OUTPUT_BYTES // 2}, end='')"))
        cut = await run(executor, ("python", f"print('x' * {OUTPUT_BYTES + 1}, end='')"))

    assert (0, OUTPUT_BYTES // 2) == (whole[0], len(whole[1]))
    assert len(cut[1]) < OUTPUT_BYTES + 99
    assert "was cut" in cut[1]


@pytest.mark.once
async def test_fifty_at_once(tmp_path: Path) -> None:
    mount = at_once.mount(tmp_path)

    async def one(number: int) -> int:
        async with RingfenceCodeExecutor(**options(mounts=[mount])) as executor:
            return (await run(executor, ("sh", at_once.script(number))))[0]

    crowd = range(at_once.CROWD)
    assert [0 for _ in crowd] == await asyncio.gather(*(one(number) for number in crowd))


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "5050" in output_of("autogen_agent", tmp_path)


async def test_it_is_a_component() -> None:
    saved = RingfenceCodeExecutor(timeout_s=5, **options()).dump_component()
    async with RingfenceCodeExecutor.load_component(saved) as executor:
        assert (0, "2\n") == await run(executor, ("python", "print(1 + 1)"))


@pytest.mark.once
async def test_over_a_server() -> None:
    with serving() as server:
        async with RingfenceCodeExecutor(server=server) as executor:
            assert (0, "2\n") == await run(executor, ("python", "print(1 + 1)"))


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("autogen")
