package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/harvest/reclaim"
	"github.com/moeserve/moeserve/node/sizing"
)

// runtimeDir is the directory that a value of --runtime-dir means.
func runtimeDir(value string) string {
	if value == "auto" {
		return reclaim.Dir()
	}
	return value
}

// reclaimOptions are the flags of reclaim.
type reclaimOptions struct {
	device, url, dir string
	gib              float64
	deadline         time.Duration
}

func newReclaim(s *streams) *cobra.Command {
	var o reclaimOptions
	cmd := &cobra.Command{
		Use:   "reclaim",
		Short: "Get memory of a GPU back that moeserve has borrowed",
		Long: `Have the moeserve processes of this machine release memory that they have borrowed of
a GPU, until so much of it is free, and keep from borrowing there for their
--harvest-cooldown. A job that needs the memory calls this before it starts, in its
prologue. Requests of moeserve's clients go on; they may become slower.

All processes of this user are asked that listen in --runtime-dir; those of other
users if that directory is shared. With --url one process is asked, at its
--admin-address; the key of MOESERVE_API_KEY is sent if it is set.

Exit codes: 0 the memory is free, or no moeserve process borrows there (its free
memory is not checked then); 1 it is not free in time.`,
		Example: `  moeserve reclaim --device 1 --gib 30 --deadline 500ms
  moeserve reclaim --device GPU-5fd4f087-86f3-7a43-b711-4771313afc50 --gib 1.5`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return reclaimMemory(cmd.Context(), s, &o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.device, "device", "", "`GPU`: its number, as in --peers, or its UUID")
	f.Float64Var(&o.gib, "gib", 0, "memory that is to be free on it, in GiB, a `NUMBER`")
	f.DurationVar(&o.deadline, "deadline", 500*time.Millisecond, "maximum `TIME` to wait for it")
	f.StringVar(&o.url, "url", "", "`URL` of the admin address of one process, in place of all of this machine")
	f.StringVar(&o.dir, "runtime-dir", "", "`DIR` in which moeserve processes listen (default $MOESERVE_RUNTIME_DIR, else this user's own)")
	return cmd
}

// isGPU reports whether name can be that of a GPU: its number or its UUID.
func isGPU(name string) bool {
	_, err := strconv.ParseUint(name, 10, 16)
	return err == nil || strings.Contains(name[1:], "-")
}

// maxReclaimGiB bounds --gib: more than any GPU has.
const maxReclaimGiB = 1 << 20

func reclaimMemory(ctx context.Context, s *streams, o *reclaimOptions) error {
	switch {
	case o.device == "":
		return usagef("--device is not set: the number of a GPU, as in --peers, or its UUID")
	case !isGPU(o.device):
		return usagef("--device is %s: must be the number of a GPU, as in --peers, or its UUID", o.device)
	case o.gib == 0:
		return usagef("--gib is not set: how much memory is to be free on GPU %s, in GiB", o.device)
	case !(o.gib > 0 && o.gib <= maxReclaimGiB):
		return usagef("--gib is %v: must be above 0 and at most %d", o.gib, maxReclaimGiB)
	case o.deadline <= 0 || o.deadline > time.Hour:
		return usagef("--deadline is %v: must be above 0 and at most 1h", o.deadline)
	}
	dir := o.dir
	if dir == "" {
		dir = os.Getenv("MOESERVE_RUNTIME_DIR")
	}
	if dir == "" {
		dir = "auto"
	}
	bytes := int64(o.gib * (1 << 30))
	c := reclaim.Client{Dir: runtimeDir(dir), URL: o.url, Key: os.Getenv("MOESERVE_API_KEY")}
	r, err := c.Reclaim(ctx, reclaim.Request{Device: o.device, Bytes: bytes, Within: o.deadline})
	switch {
	case err != nil && strings.HasPrefix(err.Error(), "reclaim: "):
		return err
	case err != nil:
		return fmt.Errorf("reclaim: %w", err)
	case r.Processes == 0:
		_, err := fmt.Fprintf(s.out, "no moeserve process borrows memory of GPU %s; its free memory was not checked\n", o.device)
		return err
	}
	if _, err := fmt.Fprintf(s.out, "GPU %s: %s free, %s released by %d in %.0f ms, %s still borrowed\n", r.Device,
		sizing.Bytes(r.Free), sizing.Bytes(r.Freed), r.Processes, r.TookMS, sizing.Bytes(r.Borrowed)); err != nil {
		return err
	}
	if !r.Met(bytes) {
		if r.Late == "" {
			r.Late = "the rest is used by other processes"
		}
		return fmt.Errorf("reclaim: %s of %s are free on GPU %s: %s", sizing.Bytes(r.Free), sizing.Bytes(bytes), r.Device, r.Late)
	}
	return nil
}
