package harvest_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// The interface of the Harvest paper (section 3.2): harvest_alloc is Runtime.Alloc,
// harvest_free is Runtime.Free, harvest_register_cb is Runtime.RegisterCallback. Another
// process that needs memory of a peer has it released by Runtime.Reclaim.
func Example() {
	const mib = 1 << 20
	gpu := emulated.GPU{MemoryBytes: 64 * mib}
	machine, err := emulated.New(emulated.Options{GPUs: []emulated.GPU{gpu, gpu}, Host: gpu})
	if err != nil {
		panic(err)
	}
	runtime, err := harvest.New(harvest.Options{
		Machine: machine, Peers: []device.Space{device.HBM(1)}, // GPU 1 lends to GPU 0
		SlabBytes: 8 * mib, HeadroomBytes: 4 * mib,
	})
	if err != nil {
		panic(err)
	}
	if err := runtime.Start(); err != nil { // reads the peers every Options.Interval
		panic(err)
	}

	// Allocate: hints say who asks, which GPU reads, and what losing the memory costs.
	hints := harvest.Hints{Client: "cache", Label: "object 7", Reader: device.HBM(0), Cost: 40 * time.Millisecond}
	kept, err := runtime.Alloc(20*mib, hints)
	if errors.Is(err, harvest.ErrNoCapacity) {
		fmt.Println("it stays in host memory")
	}
	fmt.Println(kept.Device(), kept.Bytes()/mib, "MiB")
	freed, _ := runtime.Alloc(2*mib, hints)

	// Be called back if it is revoked. Every copy holds a reference, which fails after that.
	revoked := make(chan harvest.Revocation, 1)
	if err := runtime.RegisterCallback(kept, func(v harvest.Revocation) { revoked <- v }); err != nil {
		panic(err)
	}
	ref, ok := kept.Acquire(harvest.NewOwner("reader"))
	fmt.Println("readable:", ok)
	ref.Release() // or ReleaseAt, once the work on a stream has ended

	fmt.Println("free:", runtime.Free(freed))

	// A neighbor needs 58 MiB of the peer. The device refuses it what is borrowed; once it has
	// asked, it gets it, and nothing is borrowed there for Options.Cooldown.
	fmt.Println("refused:", errors.Is(machine.Occupy(device.HBM(1), 58*mib), device.ErrOutOfMemory))
	request, err := runtime.Reclaim(device.HBM(1), 58*mib, 500*time.Millisecond)
	if err != nil {
		panic(err)
	}
	if err := request.Wait(context.Background()); err != nil {
		panic(err)
	}
	fmt.Println("neighbor:", machine.Occupy(device.HBM(1), 58*mib))

	fmt.Println("revoked:", (<-revoked).Reason)
	_, ok = kept.Acquire(nil)
	fmt.Println("readable:", ok)
	fmt.Println("free:", errors.Is(runtime.Free(kept), harvest.ErrRevoked))

	fmt.Println(runtime.Close(context.Background()), machine.Close())
	// Output:
	// gpu1 20 MiB
	// readable: true
	// free: <nil>
	// refused: true
	// neighbor: <nil>
	// revoked: external
	// readable: false
	// free: true
	// <nil> <nil>
}
