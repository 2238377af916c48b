package kv

import (
	"errors"
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

// Calibrate puts the measured crossovers of copies in one direction into hardware: the block
// sizes below which the kernel is the faster one, and its thread blocks. Where the base has a
// calibration of the same device with other thread blocks, that which is faster up to larger
// blocks stays, of two equal ones that with fewer thread blocks: so each of several measurements
// with one number of thread blocks adds to the one before.
func Calibrate(r *Result, c eval.Calibration) (planner.Hardware, error) {
	h := c.Start(&r.Machine)
	switch {
	case r.Emulated:
		return h, errors.New("kv: emulated devices do not model a kernel's copies over links")
	case r.Sizes == nil || len(r.Crossovers) == 0:
		return h, errors.New("kv: a calibration needs copies by the kernel and by the copy engines")
	}
	by := eval.MeasuredBy + "kv: rates of scattered blocks"
	if r.ThreadBlocks > 0 {
		by += fmt.Sprintf(", kernel on %d thread blocks", r.ThreadBlocks)
	}
	for _, f := range []struct {
		tier      string
		direction Direction
		key       string
		below     *int64
		blocks    *int
	}{
		{hostTier, LoadDirection, "host_load_kernel", &h.HostLoadKernelBelow, &h.HostLoadKernelBlocks},
		{hostTier, StoreDirection, "host_store_kernel", &h.HostStoreKernelBelow, &h.HostStoreKernelBlocks},
		{peerTier, LoadDirection, "peer_load_kernel", &h.PeerLoadKernelBelow, &h.PeerLoadKernelBlocks},
		{peerTier, StoreDirection, "peer_store_kernel", &h.PeerStoreKernelBelow, &h.PeerStoreKernelBlocks},
	} {
		below, source, measured := int64(0), "none: bench kv had no "+f.tier, false
		for _, x := range r.Crossovers {
			if x.Tier == f.tier && x.Direction == f.direction {
				below, source, measured = x.KernelBelowBytes, by, true
			}
		}
		belowKey, blocksKey := f.key+"_below_bytes", f.key+"_thread_blocks"
		if strings.HasPrefix(h.Sources[belowKey], eval.MeasuredBy) && (!measured || keeps(*f.below, *f.blocks, below, r.ThreadBlocks)) {
			continue
		}
		*f.below, *f.blocks = below, 0
		if below > 0 {
			*f.blocks = r.ThreadBlocks
		}
		h.Sources[belowKey], h.Sources[blocksKey] = source, source
	}
	if err := h.Validate(); err != nil {
		return h, fmt.Errorf("kv: %w", err)
	}
	return h, nil
}

// keeps reports whether a calibration (the kernel is faster below so many bytes, on so many
// thread blocks) stays beside a later one.
func keeps(below int64, blocks int, later int64, laterBlocks int) bool {
	switch {
	case below == 0 || blocks == laterBlocks: // measured again
		return false
	case below != later:
		return below > later
	case laterBlocks == 0: // one per multiprocessor, most
		return true
	}
	return blocks > 0 && blocks < laterBlocks
}
