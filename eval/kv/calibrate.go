package kv

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

// Calibrate puts the measured crossovers of copies in one direction into hardware: the block
// sizes below which the kernel is the faster one.
func Calibrate(r *Result, c eval.Calibration) (planner.Hardware, error) {
	h := c.Start(&r.Machine)
	switch {
	case r.Emulated:
		return h, errors.New("kv: emulated devices do not model a kernel's copies over links")
	case r.Sizes == nil || len(r.Crossovers) == 0:
		return h, errors.New("kv: a calibration needs copies by both methods")
	}
	by := eval.MeasuredBy + "kv: rates of scattered blocks"
	if r.ThreadBlocks > 0 {
		by += fmt.Sprintf(", kernel on %d thread blocks", r.ThreadBlocks)
	}
	for _, f := range []struct {
		tier      string
		direction Direction
		key       string
		value     *int64
	}{
		{hostTier, LoadDirection, "host_load_kernel_below_bytes", &h.HostLoadKernelBelow},
		{hostTier, StoreDirection, "host_store_kernel_below_bytes", &h.HostStoreKernelBelow},
		{peerTier, LoadDirection, "peer_load_kernel_below_bytes", &h.PeerLoadKernelBelow},
		{peerTier, StoreDirection, "peer_store_kernel_below_bytes", &h.PeerStoreKernelBelow},
	} {
		*f.value = 0
		h.Sources[f.key] = "none: bench kv had no " + f.tier
		for _, x := range r.Crossovers {
			if x.Tier == f.tier && x.Direction == f.direction {
				*f.value, h.Sources[f.key] = x.KernelBelowBytes, by
			}
		}
	}
	if err := h.Validate(); err != nil {
		return h, fmt.Errorf("kv: %w", err)
	}
	return h, nil
}
