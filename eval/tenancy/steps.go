package tenancy

import (
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
)

// Step is what a tenant is to hold from some time on.
type Step struct {
	// Text is the step as a user writes it.
	Text string
	// Bytes, and Share of the peer's memory, 0 to 1: one of them.
	Bytes int64
	Share float64
	// BeyondFree: so much more than it holds and than is free at that time.
	BeyondFree bool
}

// ParseSteps reads comma-separated steps: a size ("8GiB"), a share of the peer's memory ("50%"), either
// of them behind "free+", or 0. Errors wrap eval.ErrInput.
func ParseSteps(list string) ([]Step, error) {
	var steps []Step
	for _, text := range strings.Split(list, ",") {
		s := Step{Text: strings.TrimSpace(text)}
		size, beyond := strings.CutPrefix(s.Text, "free+")
		s.BeyondFree = beyond
		var err error
		if percent, ok := strings.CutSuffix(size, "%"); ok {
			if s.Share, err = strconv.ParseFloat(percent, 64); err == nil && !(s.Share >= 0 && s.Share <= 100) {
				err = strconv.ErrRange
			}
			s.Share /= 100
		} else if size != "0" {
			s.Bytes, err = configs.ParseBytes(size)
		}
		if err != nil {
			return nil, eval.Inputf("%q: must be a size, a share of the peer's memory, or either behind free+, as 8GiB,50%%,free+1GiB,0", s.Text)
		}
		steps = append(steps, s)
	}
	return steps, nil
}

// bytes is what the tenant is to hold, given the peer's memory now and what it holds.
func (s *Step) bytes(m *Memory, holds int64) int64 {
	n := s.Bytes + int64(s.Share*float64(m.Capacity))
	if s.BeyondFree {
		n += holds + m.Free
	}
	return max(min(n, m.Capacity-(m.Others-holds)), 0)
}
