package kernelstest

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// testArguments checks that bad arguments are rejected at enqueue, before any work runs.
func testArguments(r *rig) {
	r.run("bad", func(r *rig) {
		x := r.normal(r.dense("X", r.act, 2, 32), 0, 1)
		w := r.weights("W", r.o.Weights[0], 16, 48)
		out := r.dense("Out", r.act, 2, 16)
		other := kernels.F16
		if r.act == other {
			other = kernels.BF16
		}
		bad := []kernels.Op{
			&kernels.Embed{}, &kernels.Norm{}, &kernels.MatMul{}, &kernels.GatedMatMul{}, &kernels.Clamp{}, &kernels.RoPE{}, &kernels.AppendKV{}, &kernels.RoPEAppendKV{},
			&kernels.Attention{}, &kernels.RoPEAttention{}, &kernels.Route{}, &kernels.RouterGateUp{}, &kernels.RouteDown{}, &kernels.RouteExpertUp{}, &kernels.SortByExpert{}, &kernels.ExpertUp{}, &kernels.ExpertDown{},
			&kernels.Combine{}, &kernels.CombineNorm{}, &kernels.SiluMul{}, &kernels.Gather{}, &kernels.CopyBlocks{}, &kernels.Copy{}, &kernels.Sample{}, &kernels.Adjust{}, &kernels.Restore{}, &kernels.Mask{}, &kernels.LogProbs{},
			&kernels.MatMul{X: x.Tensor, W: w.Tensor, Out: out.Tensor},
			&kernels.CopyBlocks{Src: r.words("Src", 0).Tensor, Dst: r.words("Dst", 0).Tensor, BlockBytes: 24},
			&kernels.Clamp{X: kernels.New(x.Addr, other, 2, 16), Limit: 1},
			&kernels.SiluMul{Gate: x.Tensor, Up: x.Tensor, Out: kernels.New(x.Addr+device.Addr(r.act.Size()), r.act, 2, 32)},
		}
		for _, op := range bad {
			if err := r.backend.Enqueue(r.stream, op); err == nil {
				r.Errorf("%s takes bad arguments: %+v", op.Name(), op)
			}
		}
		r.doPart()
	})
}
