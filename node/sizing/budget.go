package sizing

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/planner"
)

// Demand is what a configuration needs of one memory space.
type Demand struct {
	// Space names it in errors: "gpu0", "host".
	Space string
	// Capacity of the space, and the Share of it that may be used (0 to 1).
	Capacity int64
	Share    float64
	// Parts that it must hold.
	Parts []planner.Part
	// Advice says what the user can do when they do not fit.
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

// Usable is what may be used of the space.
func (d Demand) Usable() int64 { return int64(float64(d.Capacity) * d.Share) }

// Room is what the parts leave free; an error says what is needed, part by part,
// and what there is.
func (d Demand) Room() (int64, error) {
	room := d.Usable() - d.Need()
	if room >= 0 {
		return room, nil
	}
	var b strings.Builder
	for _, p := range d.Parts {
		if p.Bytes == 0 {
			continue
		}
		if b.Len() > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %s", p.Name, Bytes(p.Bytes))
	}
	return room, fmt.Errorf("the memory of %s does not hold the model: %s needed (%s), %s may be used (%.0f %% of %s); %s",
		d.Space, Bytes(d.Need()), b.String(), Bytes(d.Usable()), 100*d.Share, Bytes(d.Capacity), d.Advice)
}

// KVDemand is what sizes a KV cache.
type KVDemand struct {
	// Room in bytes for all blocks; BlockBytes of one block of BlockTokens.
	Room, BlockBytes int64
	BlockTokens      int
	// MaxModelLen asked for, 0: as much as the model has and the room allows.
	MaxModelLen int
	// ModelPositions is the most that the model allows.
	ModelPositions int
	// MaxNumSeqs sequences at most run at once.
	MaxNumSeqs int
	// Blocks asked for, 0: what the sequences can use, within the room.
	Blocks int
}

// KVFit is the cache that a demand gets.
type KVFit struct {
	Blocks, MaxModelLen int
}

// Fit sizes the cache: at least one sequence of the length asked for, at most what
// MaxNumSeqs of them can use.
func (d KVDemand) Fit() (KVFit, error) {
	if d.MaxModelLen > d.ModelPositions {
		return KVFit{}, fmt.Errorf("max-model-len is %d and the model has %d positions; ask for at most these", d.MaxModelLen, d.ModelPositions)
	}
	most := d.Room / d.BlockBytes
	if int64(d.Blocks) > most {
		return KVFit{}, fmt.Errorf("a KV cache of %d blocks (%s) was asked for and there is room for %d; ask for fewer, or offload more experts", d.Blocks, Bytes(int64(d.Blocks)*d.BlockBytes), most)
	}
	if d.Blocks > 0 {
		most = int64(d.Blocks)
	}
	length := d.MaxModelLen
	if length == 0 {
		length = d.ModelPositions
	}
	perSeq := int64((length + d.BlockTokens - 1) / d.BlockTokens)
	if most < perSeq {
		if d.MaxModelLen > 0 || most == 0 {
			return KVFit{}, fmt.Errorf("the KV cache of one sequence of %d tokens takes %s and there is room for %s; lower max-model-len to at most %d, or offload more experts",
				length, Bytes(perSeq*d.BlockBytes), Bytes(most*d.BlockBytes), most*int64(d.BlockTokens))
		}
		length = int(most) * d.BlockTokens
		perSeq = most
	}
	blocks := min(most, perSeq*int64(d.MaxNumSeqs))
	if d.Blocks > 0 {
		blocks = most
	}
	return KVFit{Blocks: int(blocks), MaxModelLen: length}, nil
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
