package cpu

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestPool: several callers' loops end, also where parts wait for parts before them and fewer processors
// than threads run them, and each part runs once; all threads join a loop; idle threads sleep, and end
// when the pool is closed, from their sleep or while they poll.
func TestPool(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, procs := range []int{1, 2, 4} {
		for _, spin := range []time.Duration{0, 200 * time.Microsecond} {
			t.Run(fmt.Sprintf("procs=%d/spin=%v", procs, spin), func(t *testing.T) {
				runtime.GOMAXPROCS(procs)
				const threads, callers, loops, parts = 4, 3, 200, 16
				p := newPool(threads, nil, spin)
				var all sync.WaitGroup
				for c := range callers {
					all.Go(func() {
						for i := range loops {
							var first atomic.Int32
							var ran [parts]atomic.Int32
							p.parallel(parts, func(part int) {
								if part < parts/2 {
									first.Add(1)
								} else {
									waitFor(&first, parts/2)
								}
								ran[part].Add(1)
							})
							for part := range ran {
								if n := ran[part].Load(); n != 1 {
									t.Errorf("part %d ran %d times", part, n)
								}
							}
							if i%50 == c { // its threads fall asleep
								time.Sleep(time.Millisecond)
							}
						}
					})
				}
				ended := make(chan struct{})
				go func() { all.Wait(); close(ended) }()
				select {
				case <-ended:
				case <-time.After(time.Minute):
					t.Fatal("a loop does not end")
				}
				for start := time.Now(); p.asleep.Load() != threads-1; time.Sleep(time.Millisecond) {
					if time.Since(start) > 10*time.Second {
						t.Fatalf("%d of %d idle threads sleep", p.asleep.Load(), threads-1)
					}
				}
				// All threads take part, whether they sleep, fall asleep or poll: each part waits for all.
				for i := range loops {
					var begun atomic.Int32
					joined := make(chan struct{})
					go func() {
						p.parallel(threads, func(int) { begun.Add(1); waitFor(&begun, threads) })
						close(joined)
					}()
					select {
					case <-joined:
					case <-time.After(time.Minute):
						t.Fatalf("%d of %d threads take part", begun.Load(), threads)
					}
					time.Sleep(time.Duration(i%4) * 80 * time.Microsecond)
				}
				p.close()
				polling := newPool(threads, nil, time.Hour)
				polling.parallel(parts, func(int) {})
				polling.close()
			})
		}
	}
}
