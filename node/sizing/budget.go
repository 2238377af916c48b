package sizing

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/planner"
)

// Demand is a configuration's need of one memory space, in bytes.
type Demand struct {
	// Space is its name in errors: "gpu0", "host".
	Space string
	// Capacity of the space without the memory used by other processes, and the Share of
	// it that is usable (0 to 1).
	Capacity int64
	Share    float64
	// Parts that it must hold.
	Parts []planner.Part
	// Advice is what the user can do when they do not fit; empty: none.
	Advice string
}

// Need is the sum of the parts.
func (d Demand) Need() int64 {
	var n int64
	for _, p := range d.Parts {
		n += p.Bytes
	}
	return n
}

// Usable is the usable part of the space.
func (d Demand) Usable() int64 { return int64(float64(d.Capacity) * d.Share) }

// Room is what the parts leave free. The error is a *MisfitError.
func (d Demand) Room() (int64, error) {
	room := d.Usable() - d.Need()
	if room >= 0 {
		return room, nil
	}
	return room, &MisfitError{d}
}

// MisfitError reports a memory space that is too small for a demand.
type MisfitError struct{ Demand }

func (e *MisfitError) Error() string {
	var parts []string
	for _, p := range e.Parts {
		if p.Bytes > 0 {
			parts = append(parts, p.Name+" "+Bytes(p.Bytes))
		}
	}
	return e.text(" (" + strings.Join(parts, ", ") + ")")
}

// Brief is the error without its parts.
func (e *MisfitError) Brief() string { return e.text("") }

func (e *MisfitError) text(parts string) string {
	text := fmt.Sprintf("out of memory on %s: need %s%s, usable %s (%.0f %% of %s)",
		e.Space, Bytes(e.Need()), parts, Bytes(e.Usable()), 100*e.Share, Bytes(e.Capacity))
	if e.Advice != "" {
		text += "; " + e.Advice
	}
	return text
}

// KVDemand sizes a KV cache.
type KVDemand struct {
	// Room in bytes for all blocks; BlockBytes of one block of BlockTokens.
	Room, BlockBytes int64
	BlockTokens      int
	// MaxModelLen is the requested context in tokens; 0: the model's, or as much of it as
	// the room allows.
	MaxModelLen int
	// ModelPositions is the model's context.
	ModelPositions int
	// MaxNumSeqs is the maximum number of concurrent sequences.
	MaxNumSeqs int
	// Blocks is the requested number; 0: what the sequences can use, and Lendable more, within the
	// room.
	Blocks, Lendable int
}

// KVFit is a KV cache that fits: its blocks, and the maximum length of a sequence in tokens.
type KVFit struct {
	Blocks, MaxModelLen int
}

// Fit sizes the cache: at least one sequence of the requested length, and no more than
// MaxNumSeqs of them can use, beside what is Lendable.
func (d KVDemand) Fit() (KVFit, error) {
	if err := checkLength(d.MaxModelLen, d.ModelPositions); err != nil {
		return KVFit{}, err
	}
	limit := d.Room / d.BlockBytes
	if int64(d.Blocks) > limit {
		return KVFit{}, fmt.Errorf("--num-gpu-blocks-override is %d (%s), and there is room for %d KV blocks; lower it", d.Blocks, Bytes(int64(d.Blocks)*d.BlockBytes), limit)
	}
	if d.Blocks > 0 {
		limit = int64(d.Blocks)
	}
	length := d.MaxModelLen
	if length == 0 {
		length = d.ModelPositions
	}
	perSeq := int64((length + d.BlockTokens - 1) / d.BlockTokens)
	if limit < perSeq {
		if limit == 0 {
			return KVFit{}, fmt.Errorf("there is no room for the KV cache: one block, of %d tokens, needs %s; raise --gpu-memory-utilization", d.BlockTokens, Bytes(d.BlockBytes))
		}
		if d.MaxModelLen > 0 {
			return KVFit{}, fmt.Errorf("the KV cache of one sequence of %d tokens needs %s, and there is room for %s; lower --max-model-len to at most %d",
				length, Bytes(perSeq*d.BlockBytes), Bytes(limit*d.BlockBytes), limit*int64(d.BlockTokens))
		}
		length = int(limit) * d.BlockTokens
		perSeq = limit
	}
	blocks := min(limit, perSeq*int64(d.MaxNumSeqs)+int64(d.Lendable))
	if d.Blocks > 0 {
		blocks = limit
	}
	return KVFit{Blocks: int(blocks), MaxModelLen: length}, nil
}

// checkLength refuses sequences that are longer than the model's context.
func checkLength(maxModelLen, positions int) error {
	if maxModelLen > positions {
		return fmt.Errorf("--max-model-len is %d and the model's context is %d tokens; lower --max-model-len", maxModelLen, positions)
	}
	return nil
}

// Bytes prints a number of bytes in binary units.
func Bytes(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/unit, 0
	for v >= unit && i < 3 {
		v /= unit
		i++
	}
	return fmt.Sprintf("%.2f %s", v, [...]string{"KiB", "MiB", "GiB", "TiB"}[i])
}
