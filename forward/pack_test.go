package forward

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models/modelstest"
)

// packed is a reader of what Pack wrote to data for an upload to base.
type packed struct {
	data []byte
	base int64
}

func (p packed) words(x kernels.Tensor) []uint32 {
	if x.None() {
		return nil
	}
	raw := p.data[int64(x.Addr)-p.base:][:x.Bytes()]
	words := make([]uint32, len(raw)/4)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return words
}

// TestPackedBytes packs batches of all kinds one after another from the same HostBatch, to
// the same memory, and reads every tensor back.
func TestPackedBytes(t *testing.T) {
	c := mustParse(t, "phimoe", map[string]any{"rope_scaling": modelstest.LongRoPE})
	limits := Limits{MaxTokens: 256, MaxSeqs: 64, MaxLogits: 256, MaxModelLen: 200, BlockTokens: 16, MaxAdjust: 500, MaxTopLogProbs: 3}
	const base = 1 << 20
	random := rand.New(rand.NewPCG(3, 8))
	ints := func(vs ...int32) (words []uint32) {
		for _, v := range vs {
			words = append(words, uint32(v))
		}
		return words
	}
	number := func(at *[]uint32, v float32) { *at = append(*at, math.Float32bits(v)) }
	data := make([]byte, StepUploadBytes(limits, 1))
	h := NewHostBatch(c, limits)
	for round := range 200 {
		h.Reset(0, 0, 0)
		decode, plain := round%3 == 0, round%5 < 2
		want := map[string][]uint32{"starts": ints(0)}
		add := func(name string, vs ...int32) { want[name] = append(want[name], ints(vs...)...) }
		var tables [][]int32
		var topK, topP, minP, repetition, presence, frequency, adjustIDs, adjustSeen, adjustBias []uint32
		adjustStarts := ints(0)
		var usesTopK, usesTopP, usesMinP bool
		rows := 0
		for range 1 + random.IntN(40) {
			q := Sequence{Start: random.IntN(190), Long: random.IntN(2) == 0}
			for n := random.IntN(6); len(q.IDs) <= n; {
				q.IDs = append(q.IDs, int32(random.IntN(c.Vocab)))
				if decode {
					break
				}
			}
			end := q.Start + len(q.IDs)
			for range (end+15)/16 + random.IntN(3) { // room that is there already stays
				q.Blocks = append(q.Blocks, int32(random.IntN(1000)))
			}
			first, err := h.Append(&q)
			check(t, err)
			if first != rows {
				t.Fatalf("round %d: first row %d, want %d", round, first, rows)
			}
			for i, id := range q.IDs {
				p := q.Start + i
				add("ids", id)
				add("slots", q.Blocks[p/16]*16+int32(p%16))
				if q.Long {
					p += 200
				}
				add("rope", int32(p))
			}
			add("contexts", int32(end))
			tables = append(tables, q.Blocks[:(end+15)/16])
			rows += len(q.IDs)
			add("starts", int32(rows))
			for r := range q.IDs {
				if !decode && random.IntN(2) == 0 {
					continue
				}
				d := SamplingParams{Seed: random.Uint64(), Sample: random.Int32(), Position: random.Int32()}
				if !plain {
					d.Temperature, d.TopK = float32(random.IntN(3)), int32(random.IntN(2)*9)
					d.TopP, d.MinP = float32(random.IntN(3))/2, float32(random.IntN(3))/2
					d.RepetitionPenalty, d.PresencePenalty, d.FrequencyPenalty = float32(random.IntN(3)), random.Float32(), random.Float32()
					for range random.IntN(3) * random.IntN(2) {
						d.Adjust = append(d.Adjust, TokenAdjust{ID: int32(random.IntN(c.Vocab)), Seen: int32(random.IntN(4) - 1), Bias: random.Float32()})
					}
				}
				_, err := h.Sample(first+r, &d)
				check(t, err)
				add("logit rows", int32(first+r))
				add("samples", d.Sample)
				add("positions", d.Position)
				add("seeds", int32(d.Seed), int32(d.Seed>>32))
				w := want["temperatures"]
				number(&w, d.Temperature)
				want["temperatures"] = w
				if d.TopP == 0 {
					d.TopP = 1
				}
				if d.RepetitionPenalty == 0 {
					d.RepetitionPenalty = 1
				}
				usesTopK = usesTopK || d.Temperature > 0 && d.TopK > 0
				usesTopP = usesTopP || d.Temperature > 0 && d.TopP < 1
				usesMinP = usesMinP || d.Temperature > 0 && d.MinP > 0
				topK = append(topK, uint32(d.TopK))
				number(&topP, d.TopP)
				number(&minP, d.MinP)
				number(&repetition, d.RepetitionPenalty)
				number(&presence, d.PresencePenalty)
				number(&frequency, d.FrequencyPenalty)
				for _, a := range d.Adjust {
					adjustIDs, adjustSeen = append(adjustIDs, uint32(a.ID)), append(adjustSeen, uint32(a.Seen))
					number(&adjustBias, a.Bias)
				}
				adjustStarts = append(adjustStarts, uint32(len(adjustIDs)))
			}
		}
		widest := 0
		for _, blocks := range tables {
			widest = max(widest, len(blocks))
		}
		if decode {
			h.PadContext(128)
			widest = max(widest, 8)
		}
		for _, blocks := range tables {
			add("blocks", append(slices.Clone(blocks), make([]int32, widest-len(blocks))...)...)
		}
		if usesTopK {
			want["top-k"] = topK
		}
		if usesTopP {
			want["top-p"] = topP
		}
		if usesMinP {
			want["min-p"] = minP
		}
		if len(adjustIDs) > 0 {
			want["adjust starts"], want["adjust ids"], want["adjust seen"], want["adjust bias"] = adjustStarts, adjustIDs, adjustSeen, adjustBias
			want["repetition"], want["presence"], want["frequency"] = repetition, presence, frequency
		}
		b, n, err := h.Pack(data, base)
		check(t, err)
		if n > int64(len(data)) || b.Rows != rows || b.Attention.Seqs != len(tables) || b.Sampling.Rows != len(topK) {
			t.Fatalf("round %d: %d bytes, %d rows of %d sequences, %d logit rows", round, n, b.Rows, b.Attention.Seqs, b.Sampling.Rows)
		}
		got := packed{data[:n], base}
		for name, x := range map[string]kernels.Tensor{
			"ids": b.IDs, "rope": b.RopeRows, "slots": b.Attention.Slots, "starts": b.Attention.SeqStarts, "contexts": b.Attention.ContextLens, "blocks": b.Attention.BlockTable,
			"logit rows": b.Sampling.LogitRows, "samples": b.Sampling.Samples, "positions": b.Sampling.Positions, "temperatures": b.Sampling.Temperature, "seeds": b.Sampling.Seeds,
			"top-k": b.Sampling.TopK, "top-p": b.Sampling.TopP, "min-p": b.Sampling.MinP,
			"adjust starts": b.Sampling.Adjust.Starts, "adjust ids": b.Sampling.Adjust.IDs, "adjust seen": b.Sampling.Adjust.Seen, "adjust bias": b.Sampling.Adjust.Bias,
			"repetition": b.Sampling.Adjust.Repetition, "presence": b.Sampling.Adjust.Presence, "frequency": b.Sampling.Adjust.Frequency,
		} {
			if w := got.words(x); !slices.Equal(w, want[name]) {
				t.Fatalf("round %d: %s are %s, want %s", round, name, fmt.Sprint(w), fmt.Sprint(want[name]))
			}
			delete(want, name)
		}
		if len(want) > 0 {
			t.Fatalf("round %d: not packed: %v", round, want)
		}
	}
}
