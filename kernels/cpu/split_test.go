package cpu_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
)

// TestSplitExperts divides experts by columns: what ExpertFFN computes from a column on has the bits
// of ExpertUp and ExpertDown of these columns, in both layouts, and with the other columns' added it
// is the whole expert's result up to the order of sums.
func TestSplitExperts(t *testing.T) {
	for _, isa := range isas() {
		for _, w := range []kernels.DType{kernels.BF16, kernels.F16} {
			for _, s := range []struct {
				hidden, intermediate, tokens, threads int
				first                                 [3]int // of experts 2, 0 and 1, as the case lists them
			}{
				{64, 128, 1, 1, [3]int{64, 64, 64}}, {128, 192, 2, 3, [3]int{0, 64, 128}}, {192, 1088, 8, 8, [3]int{1024, 0, 512}}, {320, 128, 21, 3, [3]int{0, 64, 0}},
			} {
				t.Run(fmt.Sprintf("%s/%v/%+v", isa, w, s), func(t *testing.T) {
					m, b := openMachine(t, cpu.Options{Threads: s.threads, ISA: isa}, emulated.Options{Check: true})
					h := newHost(t, m, b)
					shape := kernels.ExpertShape{Hidden: s.hidden, Intermediate: s.intermediate, DType: w}
					for _, act := range []kernels.DType{kernels.F32, kernels.BF16} {
						rows := newExpertCase(h, shape, kernels.RowMajor, act, s.tokens)
						rows.run(&kernels.ExpertUp{ExpertGEMM: rows.up}, &kernels.ExpertDown{ExpertGEMM: rows.down})
						whole := make([]float32, rows.down.Out.Elements())
						kernels.ToFloat32(whole, h.readBytes(rows.down.Out), act)
						// One side of every expert at a time.
						side := func(of func(first int) kernels.Columns) []byte {
							clear(h.memory[rows.down.Out.Addr].Write(0, rows.down.Out.Bytes()))
							for i, first := range s.first {
								c := of(first)
								if c.End == c.First {
									continue
								}
								up := rows.up
								up.Columns, up.Out, up.Experts = c, up.Out.Narrow(1, 0, c.End-c.First), up.Experts.Slice(i, i+1)
								down := up
								down.X, down.Out = up.Out, rows.down.Out
								rows.run(&kernels.ExpertUp{ExpertGEMM: up}, &kernels.ExpertDown{ExpertGEMM: down})
							}
							return h.readBytes(rows.down.Out)
						}
						rest := side(func(first int) kernels.Columns { return kernels.Columns{First: first, End: s.intermediate} })
						for _, tag := range []string{kernels.RowMajor, kernels.Tiles} {
							c := newExpertCase(h, shape, tag, act, s.tokens)
							first := h.ints(int32(s.first[0]), int32(s.first[1]), int32(s.first[2]))
							c.run(&kernels.ExpertFFN{ExpertGEMM: c.ffn, First: first})
							if got := h.readBytes(c.ffn.Out); !slices.Equal(got, rest) {
								t.Errorf("%s, activations of %v: other bits than of two operations on these columns", tag, act)
							}
							if act != kernels.F32 {
								continue
							}
							// The first columns' results and these, added.
							side(func(first int) kernels.Columns { return kernels.Columns{End: first} })
							var src, dst []uint64
							for p := range s.tokens * 2 {
								row := uint64(p * s.hidden * act.Size())
								src, dst = append(src, uint64(c.ffn.Out.Addr)+row), append(dst, uint64(rows.down.Out.Addr)+row)
							}
							c.run(&kernels.AddRows{Src: tensor(h, kernels.U64, src, len(src)), Dst: tensor(h, kernels.U64, dst, len(dst)), Columns: s.hidden, DType: act})
							for i, got := range h.read(rows.down.Out) {
								if d := math.Abs(float64(got - whole[i])); d > 1e-4*(1+math.Abs(float64(whole[i]))) {
									t.Fatalf("%s: element %d is %v, want %v", tag, i, got, whole[i])
								}
							}
						}
					}
				})
			}
		}
	}
}

// TestSplitExpertErrors: First of an expert that is no column to begin at.
func TestSplitExpertErrors(t *testing.T) {
	h := openHost(t, 1)
	c := newExpertCase(h, kernels.ExpertShape{Hidden: 64, Intermediate: 128, DType: kernels.BF16}, kernels.RowMajor, kernels.F32, 1)
	for _, first := range []int32{-64, 32, 128} {
		err := cpu.RunFFN(h.backend, &kernels.ExpertFFN{ExpertGEMM: c.ffn, First: h.ints(0, first, 0)})
		if want := fmt.Sprintf("cpu: expert_ffn: First[1] is %d, want a multiple of 64 below 128", first); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// TestAddRows adds rows in every type, with one rounding.
func TestAddRows(t *testing.T) {
	h := openHost(t, 2)
	for _, act := range []kernels.DType{kernels.F32, kernels.BF16, kernels.F16} {
		const rows, columns = 5, 48
		var values [2][]float32
		var at [2]kernels.Tensor
		for i := range values {
			for j := range rows * columns {
				values[i] = append(values[i], float32(j*(i+1)%31)+float32(i)*0.125)
			}
			data := make([]byte, rows*columns*act.Size())
			kernels.FromFloat32(data, values[i], act)
			at[i] = h.bytesTensor(act, data, rows, columns)
		}
		row := func(t kernels.Tensor, i int) uint64 { return uint64(t.Addr) + uint64(i*columns*act.Size()) }
		// Row 4 onto 0, and 1 onto 3.
		op := kernels.AddRows{
			Src: tensor(h, kernels.U64, []uint64{row(at[0], 4), row(at[0], 1)}, 2), Dst: tensor(h, kernels.U64, []uint64{row(at[1], 0), row(at[1], 3)}, 2), Columns: columns, DType: act,
		}
		want := slices.Clone(values[1])
		for j := range columns {
			want[j] += values[0][4*columns+j]
			want[3*columns+j] += values[0][columns+j]
		}
		data := make([]byte, len(want)*act.Size())
		kernels.FromFloat32(data, want, act)
		if err := h.backend.Enqueue(h.stream, &op); err != nil {
			t.Fatal(err)
		}
		if err := h.stream.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := h.readBytes(at[1]); !slices.Equal(got, data) {
			t.Errorf("%v: other sums than %v", act, want)
		}
		binary.NativeEndian.PutUint64(h.memory[op.Src.Addr].Write(0, 8), row(at[0], 0)+2)
		if err := h.backend.Enqueue(h.stream, &op); err != nil {
			t.Fatal(err)
		}
		if err := h.stream.Synchronize(t.Context()); err == nil || !strings.Contains(err.Error(), "add_rows: Src[0]") {
			t.Errorf("an address that is no multiple of 16 gives %v", err)
		}
		h = openHost(t, 2)
	}
}
