#!/usr/bin/env python3
"""A tenant of the GPU that moeserve borrows from, for `moeserve bench harvest --tenant`.

    CUDA_VISIBLE_DEVICES=1 LD_PRELOAD=libmoeserve-reclaim.so python3 tools/cuda/tenant.py

Answers requests on standard input, a JSON object on a line each (eval/tenancy/process.go has the protocol). "hold" is so many
bytes in all, in one allocation, or with --piece GIB in some of so many GiB; without the preloaded library one larger than what is free is
refused. "work" is computed for some seconds: "bf16 product", GEMMs of 8192 x 8192 x 8192 in operations per second, or "HBM
loop", copies of 1 GiB within the GPU's memory, in bytes read and written per second. Needs PyTorch; with --host it
holds host memory and computes with Python, which tries the protocol without a GPU.
"""
import json
import sys
import time

SIZE = 8192
LOOP_BYTES = 1 << 30


class Gpu:
    def __init__(self):
        import torch

        self.torch = torch
        self.a, self.b = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.c = torch.empty_like(self.a)
        self.source = torch.ones(LOOP_BYTES, dtype=torch.uint8, device="cuda")
        self.destination = torch.empty_like(self.source)
        self.work = {"bf16 product": (self.product, 2.0 * SIZE**3), "HBM loop": (self.copy, 2.0 * LOOP_BYTES)}
        for once, _ in self.work.values():
            once()
        self.wait()

    def product(self):
        self.torch.mm(self.a, self.b, out=self.c)

    def copy(self):
        self.destination.copy_(self.source)

    def wait(self):
        self.torch.cuda.synchronize()

    def take(self, n):
        try:
            held = self.torch.empty(n, dtype=self.torch.uint8, device="cuda")
        except self.torch.cuda.OutOfMemoryError as e:
            raise MemoryError(str(e).splitlines()[0]) from e
        held[:: 1 << 20] = 7
        self.wait()
        return held

    def freed(self):
        self.torch.cuda.empty_cache()


class Host:
    """Host memory, to try the protocol; no part of a measurement."""

    LIMIT = 64 << 20

    def __init__(self):
        self.work = {"bf16 product": (lambda: sum(i * i for i in range(1000)), 2000.0), "HBM loop": (lambda: bytes(bytearray(1 << 16)), 2.0 * (1 << 16))}

    def wait(self):
        pass

    def take(self, n):
        if n > self.LIMIT:
            raise MemoryError(f"{n} bytes are more than {self.LIMIT}")
        return bytearray(n)

    def freed(self):
        pass


class Tenant:
    def __init__(self, device, piece=0):
        self.device = device
        self.piece = piece  # bytes; 0: no limit
        self.blocks = []  # (bytes, memory), the latest last

    def held(self):
        return sum(n for n, _ in self.blocks)

    def hold(self, n):
        begin = time.perf_counter()
        refused = False
        while self.held() > n:
            self.blocks.pop()
        self.device.freed()
        before = len(self.blocks)
        while not refused and (missing := n - self.held()) > 0:
            missing = min(missing, self.piece or missing)
            try:
                self.blocks.append((missing, self.device.take(missing)))
            except MemoryError as e:
                print(f"tenant: refused: {e}", file=sys.stderr, flush=True)
                refused = True
                del self.blocks[before:]  # all or nothing
                self.device.freed()
        return {"held": self.held(), "refused": refused, "ms": 1e3 * (time.perf_counter() - begin)}

    def compute(self, kind, seconds):
        once, amount = self.device.work[kind]
        self.device.wait()
        begin, n = time.perf_counter(), 0
        while (took := time.perf_counter() - begin) < seconds:
            for _ in range(8):
                once()
            n += 8
            self.device.wait()
        return {"rate": n * amount / took}

    def answer(self, request):
        if "hold" in request:
            return self.hold(request["hold"])
        return self.compute(request["work"], request["seconds"])


def main():
    given = sys.argv[1:]
    piece = int(float(given[given.index("--piece") + 1]) * (1 << 30)) if "--piece" in given else 0
    tenant = Tenant(Host() if "--host" in given else Gpu(), piece)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            said = tenant.answer(json.loads(line))
        except Exception as e:  # the one who asks is told, and decides
            said = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
