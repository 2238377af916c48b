package transfer

import (
	"slices"

	"github.com/moeserve/moeserve/device"
)

// MinSplitBytes is the minimum part of a copy that is worth moving to another link. On
// H200s (NVLink at 395 GB/s) a separate copy costs the host some 10 us and the device 20,
// in which a peer sends 8 MB. For an expert of 9 MB the host's share of 1 MB would gain
// nothing; of a wave of many experts the host sends whole ones.
const MinSplitBytes = 4 << 20

// linkLoad is the bytes that one memory is to send, and the rate of its link per second.
type linkLoad struct{ bytes, rate float64 }

// hostShares returns how many of each peer's bytes the host should send instead, so that
// all links end at the same time, considering the bytes that only the host can send.
// Unknown rates are 0; with one of them nothing is moved to the host. The result reuses
// the capacity of moved.
func hostShares(moved []float64, host linkLoad, peers []linkLoad) []float64 {
	moved = append(moved[:0], make([]float64, len(peers))...)
	if host.rate <= 0 || slices.ContainsFunc(peers, func(p linkLoad) bool { return p.rate <= 0 }) {
		return moved
	}
	// Peers that would end before the others send all of their bytes: their moved is -1.
	for {
		bytes, rate := host.bytes, host.rate
		for i, p := range peers {
			if moved[i] == 0 {
				bytes, rate = bytes+p.bytes, rate+p.rate
			}
		}
		end := bytes / rate // in seconds
		again := false
		for i, p := range peers {
			if moved[i] == 0 && p.bytes <= end*p.rate {
				moved[i], again = -1, true
			}
		}
		if again {
			continue
		}
		for i, p := range peers {
			if moved[i] == 0 && end > host.bytes/host.rate { // otherwise the host's own bytes end last
				moved[i] = p.bytes - end*p.rate
			}
			moved[i] = max(moved[i], 0)
		}
		return moved
	}
}

// alignedShare rounds a share down to the alignment, and to 0 if it is below least.
func alignedShare(moved float64, least int64) int64 {
	if n := int64(moved) / device.Alignment * device.Alignment; n >= least {
		return n
	}
	return 0
}

// Splits reports whether the host would send at least MinSplitBytes of a copy from a
// peer, with no other copies, at these link rates in bytes per second.
func Splits(bytes int64, host, peer float64) bool {
	moved := hostShares(nil, linkLoad{rate: host}, []linkLoad{{float64(bytes), peer}})
	return alignedShare(moved[0], MinSplitBytes) > 0
}
