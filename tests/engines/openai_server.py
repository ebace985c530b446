"""A small OpenAI-compatible server on a torch model, with faults by attempt: what clients meet, without a network."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

MODEL, MAX_MODEL_LEN = "policy", 64
STATUSES = {"400": 400, "401": 401, "403": 403, "404": 404, "429": 429, "429 later": 429, "500": 500, "moved": 302}


class OpenAIServer:
    """Answers `/v1/models` and `/v1/completions` as vLLM does.

    Attributes:
        faults: by an attempt's seed, what its next tries meet before it is answered; None stands for any seed, `models` for the list of models.
        asked: the bodies that came.
        headers: those of each body.
        raw: log-probs before the temperature, as servers report them that were not told otherwise.
        released: held tries go on once it is set.
        peak: most tries that were under way at once.
    """

    def __init__(self, policy: Path) -> None:
        self.faults: dict[int | str | None, list[str]] = defaultdict(list)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.released, self.lock = threading.Event(), threading.Lock()
        self.under_way = self.peak = 0
        self.raw = False
        self.load(policy)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def load(self, policy: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(policy / "modules" / "policy", dtype=torch.float32).eval()

    def fault(self, body: dict[str, Any]) -> str | None:
        with self.lock:
            waiting = self.faults[body.get("seed")] or self.faults[None]
            return waiting.pop(0) if waiting else None

    @torch.inference_mode()
    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, new, logprobs, reason = body["prompt"], [], [], "length"
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        while len(new) < body["max_tokens"] and reason == "length":
            logits = self.model(input_ids=torch.tensor([prompt + new])).logits[0, -1]
            drawn = torch.log_softmax(logits / body["temperature"], -1)
            new.append(int(torch.multinomial(drawn.exp(), 1, generator=generator)))
            logprobs.append(float((torch.log_softmax(logits, -1) if self.raw else drawn)[new[-1]]))
            reason = "stop" if new[-1] in body.get("stop_token_ids", ()) else reason
        if body.get("echo"):
            logits = torch.log_softmax(self.model(input_ids=torch.tensor([prompt])).logits[0, :-1], -1)
            logprobs = [None, *logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), *logprobs]
        return {"index": 0, "text": "", "token_ids": new, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.headers.append(dict(self.headers))
                fault = server.fault({"seed": "models"})
                if fault in STATUSES:
                    self.say(STATUSES[fault], {"error": f"no, {self.headers['Authorization']}"})
                else:
                    self.say(200, {"data": [{"id": MODEL, "max_model_len": MAX_MODEL_LEN}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.asked.append(body)
                    server.headers.append(dict(self.headers))
                    server.under_way += 1
                    server.peak = max(server.peak, server.under_way)
                fault = server.fault(body)
                if fault == "hold":
                    server.released.wait(30)
                answer = {"choices": [server.answer(body)]}
                with server.lock:
                    server.under_way -= 1
                self.meet(fault, answer)

            def meet(self, fault: str | None, answer: dict[str, Any]) -> None:
                (choice,) = answer["choices"]
                if fault in STATUSES:
                    later = {"429": {"Retry-After": "0"}, "429 later": {"Retry-After": "3600"}, "moved": {"Location": "/elsewhere"}}
                    self.say(STATUSES[fault], {"error": f"no, {self.headers['Authorization']}"}, later.get(fault, {}))
                elif fault == "drop":
                    self.close_connection = True
                elif fault == "truncated":
                    self.say(200, answer, {"Content-Length": "9999"})
                elif fault == "not JSON":
                    self.say(200, "<html>")
                else:
                    if fault == "no ids":
                        del choice["token_ids"]
                    elif fault == "no logprobs":
                        choice["logprobs"] = None
                    elif fault == "short":
                        choice["logprobs"]["token_logprobs"].pop()
                    elif fault == "odd reason":
                        choice["finish_reason"] = "content_filter"
                    self.say(200, answer)

            def say(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
                sent = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(sent)), **(headers or {})}.items():
                    self.send_header(name, value)
                with suppress(ConnectionError):  # who asked may have hung up
                    self.end_headers()
                    self.wfile.write(sent)
                    self.wfile.flush()
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@contextmanager
def serving(policy: Path) -> Iterator[OpenAIServer]:
    """A server with the weights of a policy folder, until the end of the block."""
    server = OpenAIServer(policy)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.http.shutdown()
        thread.join()
        server.http.server_close()
