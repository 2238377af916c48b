package forward

import (
	"encoding/binary"
	"math"

	"github.com/moeserve/moeserve/models"
)

// ropeRow returns the row of the RoPE table for a token at position. long selects the long
// factors of longrope, which apply to the whole sequence once it is longer than RoPE.LongAfter.
func ropeRow(c *models.Config, l *Limits, position int, long bool) int32 {
	if long && c.RoPE.Variants() > 1 {
		position += l.MaxModelLen
	}
	return int32(position)
}

// writeRotation writes one row of a RoPE table: cosines, then sines, as little-endian
// float32. The angle is rounded to float32 before its cosine is taken, as the
// reference implementation does.
func writeRotation(dst []byte, f models.Frequencies, position int) {
	half := len(f.Inverse)
	for i, inv := range f.Inverse {
		angle := float64(float32(position) * inv)
		binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(float32(math.Cos(angle))*f.Scale))
		binary.LittleEndian.PutUint32(dst[4*(half+i):], math.Float32bits(float32(math.Sin(angle))*f.Scale))
	}
}
