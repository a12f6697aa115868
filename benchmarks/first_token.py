"""The bare scripts of `bench_swap`: load one model, make one token, say "token". What an owner would write.

    python benchmarks/first_token.py llama MODEL.gguf PROMPT
    python benchmarks/first_token.py asyncllm ARGUMENTS PROMPT
    python benchmarks/first_token.py llm ARGUMENTS PROMPT

`llama` makes the context that Citadel makes of the same settings: one sequence, as many tokens, batches of the same
sizes, one thread for both kinds of batch, flash attention; the weights mapped, and greedy.

ARGUMENTS are those of vLLM's AsyncEngineArgs, as JSON. `asyncllm` has the layout of a server: vLLM is imported here,
and again in the process of the engine that vLLM starts. `llm` has everything in this one process, imports vLLM once,
and could serve one caller at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

CONTEXT = 2048


def llama(model: str, prompt: str) -> None:
    from llama_cpp import Llama, llama_cpp  # noqa: PLC0415 - to import it is part of what is measured

    defaults = llama_cpp.llama_model_default_params

    def without_amx() -> Any:
        """llama.cpp 0.3.36 crashes in its AMX kernels; Citadel leaves them out as well."""
        settings = defaults()
        settings.use_extra_bufts = False
        return settings

    llama_cpp.llama_model_default_params = without_amx
    threads, batch = {"n_threads": 1, "n_threads_batch": 1}, {"n_batch": 2048, "n_ubatch": 512}
    llm = Llama(model, n_ctx=CONTEXT, **threads, **batch, flash_attn=True, verbose=False)
    asked = [{"role": "user", "content": prompt}]
    for _piece in llm.create_chat_completion(asked, max_tokens=2, temperature=0.0, stream=True):
        print("token", flush=True)


def asyncllm(arguments: str, prompt: str) -> None:
    from vllm.config import StructuredOutputsConfig  # noqa: PLC0415
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    settings = json.loads(arguments)
    settings["structured_outputs_config"] = StructuredOutputsConfig(**settings["structured_outputs_config"])

    async def first_token() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        async for _output in llm.generate(prompt, SamplingParams(max_tokens=1), "first"):
            print("token", flush=True)
        llm.shutdown(timeout=0.2)

    asyncio.run(first_token())


def llm(arguments: str, prompt: str) -> None:
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    LLM(**json.loads(arguments)).generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    print("token", flush=True)


if __name__ == "__main__":
    {"llama": llama, "asyncllm": asyncllm, "llm": llm}[sys.argv[1]](*sys.argv[2:])
