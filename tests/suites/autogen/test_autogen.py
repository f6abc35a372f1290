"""Our executor under AutoGen's interface; AutoGen has no suite for executors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
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
    assert 124 == late[0]
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
