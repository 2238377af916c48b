package emulated_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// program is a small program on a checked machine.
type program struct {
	*testing.T
	m         *emulated.Machine
	a, b, c   device.Executor
	host      device.Executor
	x, y, z   device.Memory
	pinned    device.Memory
	e         device.Event
	f         device.Fence
	tolerated bool
}

const programBytes = 4096

func (p *program) ok(err error) {
	p.Helper()
	if err != nil {
		p.Fatal(err)
	}
}

func (p *program) all(m device.Memory) device.Range { return m.Range(0, m.Bytes()) }

func (p *program) copy(s device.Stream, dst, src device.Memory) {
	p.Helper()
	p.ok(s.Copy(p.all(dst), p.all(src)))
}

func (p *program) read(s device.Executor, m device.Memory) {
	p.Helper()
	p.ok(s.Execute(device.Work{Name: "read", Reads: []device.Range{p.all(m)}}))
}

func (p *program) write(s device.Executor, m device.Memory) {
	p.Helper()
	p.ok(s.Execute(device.Work{Name: "write", Writes: []device.Range{p.all(m)}}))
}

func (p *program) sync(s device.Stream) {
	p.Helper()
	p.ok(s.Synchronize(p.Context()))
}

// modes are the machines that programs run on: what the check finds must not
// depend on the order in which things really ran.
func modes() map[string]emulated.Options {
	m := map[string]emulated.Options{
		"wall":  {Check: true},
		"eager": {Check: true, Virtual: true},
		"lazy":  {Check: true, Virtual: true, Schedule: emulated.Lazy},
	}
	for seed := range uint64(6) {
		m[fmt.Sprintf("random%d", seed)] = emulated.Options{Check: true, Virtual: true, Schedule: emulated.Random, Seed: seed}
	}
	return m
}

func runProgram(t *testing.T, o emulated.Options, f func(*program)) []emulated.Finding {
	t.Helper()
	var told int
	o.Report = func(emulated.Finding) { told++ }
	m, err := emulated.New(o)
	if err != nil {
		t.Fatal(err)
	}
	p := &program{T: t, m: m}
	p.a, p.b, p.c = stream(t, m, device.HBM(0), "a"), stream(t, m, device.HBM(1), "b"), stream(t, m, device.HBM(2), "c")
	p.host = stream(t, m, device.Host, "host stream")
	mems := map[string]*device.Memory{"x": &p.x, "y": &p.y, "z": &p.z}
	for name, mem := range mems {
		if *mem, err = m.Alloc(device.HBM(0), programBytes, name); err != nil {
			t.Fatal(err)
		}
	}
	if p.pinned, err = m.Alloc(device.Host, programBytes, "pinned"); err != nil {
		t.Fatal(err)
	}
	p.pinned.Write(0, programBytes)
	if p.e, err = m.NewEvent(); err != nil {
		t.Fatal(err)
	}
	if p.f, err = m.NewFence("f"); err != nil {
		t.Fatal(err)
	}
	f(p)
	// Everything ends before it is freed, whatever the program left out.
	for _, s := range []device.Stream{p.a, p.b, p.c, p.host} {
		if err := s.Recover(context.Background()); err != nil && !p.tolerated {
			t.Fatal(err)
		}
	}
	found := m.Findings()
	for _, mem := range []device.Memory{p.x, p.y, p.z, p.pinned} {
		if mem != nil {
			if err := mem.Free(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if told != len(m.Findings()) || len(m.Findings()) != len(found) {
		t.Errorf("%d findings, %d at the end, %d reported", len(found), len(m.Findings()), told)
	}
	return found
}

// TestCheckFinds plants one mistake in each program.
func TestCheckFinds(t *testing.T) {
	for _, c := range []struct {
		name string
		kind emulated.FindingKind
		// says is what the finding must contain.
		says []string
		run  func(*program)
	}{
		{
			"write then read", emulated.Unordered,
			[]string{`memory "y"`, `stream "a" copy writes [0, 4096)`, `stream "b" launch "read" reads [0, 4096)`, "record an event"},
			func(p *program) {
				p.copy(p.a, p.y, p.pinned)
				p.read(p.b, p.y)
			},
		},
		{
			"read then write", emulated.Unordered,
			[]string{`memory "x"`},
			func(p *program) {
				p.write(p.a, p.x)
				p.sync(p.a)
				p.read(p.b, p.x)
				p.write(p.a, p.x)
			},
		},
		{
			"write then write", emulated.Unordered,
			[]string{`stream "a" launch "write" writes`, `stream "c" launch "write" writes`},
			func(p *program) { p.write(p.a, p.x); p.write(p.c, p.x) },
		},
		{
			"overlap of one byte", emulated.Unordered,
			[]string{"[2047, 2048)"},
			func(p *program) {
				p.ok(p.a.Copy(p.x.Range(0, 2048), p.pinned.Range(0, 2048)))
				p.ok(p.b.Copy(p.x.Range(2047, 2048), p.pinned.Range(0, 2048)))
			},
		},
		{
			"the event lies before the write", emulated.Unordered, nil,
			func(p *program) {
				p.write(p.a, p.x)
				p.ok(p.a.Record(p.e))
				p.write(p.a, p.x)
				p.ok(p.b.Wait(p.e))
				p.read(p.b, p.x)
			},
		},
		{
			"the wait lies behind the read", emulated.Unordered, nil,
			func(p *program) {
				p.write(p.a, p.x)
				p.ok(p.a.Record(p.e))
				p.sync(p.a)
				p.write(p.a, p.x)
				p.read(p.b, p.x)
				p.ok(p.b.Wait(p.e))
			},
		},
		{
			"a fence signaled too early", emulated.Unordered, nil,
			func(p *program) {
				p.write(p.a, p.x)
				p.sync(p.a)
				p.ok(p.b.WaitFence(p.f, 1))
				p.read(p.b, p.x)
				p.ok(p.a.SignalFence(p.f, 1))
				p.write(p.a, p.x)
			},
		},
		{
			"a wait for too small a value of a fence", emulated.Unordered, nil,
			func(p *program) {
				p.write(p.a, p.x)
				p.sync(p.a)
				p.ok(p.a.SignalFence(p.f, 1))
				p.write(p.a, p.x)
				p.ok(p.a.SignalFence(p.f, 2))
				// Even where both signals really came first.
				p.ok(p.b.WaitFence(p.f, 1))
				p.read(p.b, p.x)
			},
		},
		{
			"host reads what a stream writes", emulated.Unordered,
			[]string{`memory "pinned"`, "synchronize"},
			func(p *program) {
				p.write(p.a, p.x)
				p.sync(p.a)
				p.copy(p.a, p.pinned, p.x)
				p.pinned.Read(0, 1)
			},
		},
		{
			"host writes what a stream reads", emulated.Unordered,
			[]string{`memory "pinned"`, "host write writes [100, 101)"},
			func(p *program) { p.copy(p.a, p.x, p.pinned); p.pinned.Write(100, 1) },
		},
		{
			"host learns of another stream only", emulated.Unordered, nil,
			func(p *program) {
				p.write(p.b, p.y)
				p.copy(p.a, p.x, p.pinned)
				p.sync(p.b)
				p.pinned.Write(0, 8)
			},
		},
		{
			"a chain with a missing link", emulated.Unordered, nil,
			func(p *program) {
				p.write(p.a, p.x)
				p.ok(p.a.Record(p.e))
				p.ok(p.b.Wait(p.e))
				p.copy(p.b, p.y, p.x)
				p.copy(p.c, p.z, p.pinned)
				p.write(p.c, p.x)
			},
		},
		{
			"work declares while it runs", emulated.Unordered,
			[]string{`launch "table"`},
			func(p *program) {
				p.write(p.a, p.x)
				p.ok(p.b.Execute(device.Work{Name: "table", Run: func(a device.Access) error {
					a.Write(p.x.Range(16, 16))
					return nil
				}}))
			},
		},
		{
			"work touches host memory", emulated.Unordered,
			[]string{`launch "touch"`},
			func(p *program) {
				p.copy(p.a, p.x, p.pinned)
				p.ok(p.host.Execute(device.Work{Name: "touch", Run: func(device.Access) error {
					p.pinned.Write(0, 4)
					return nil
				}}))
			},
		},
		{
			"read of unwritten memory", emulated.Uninitialized,
			[]string{`stream "a" launch "read"`, `memory "x" on gpu0`},
			func(p *program) { p.read(p.a, p.x) },
		},
		{
			"read beyond what was written", emulated.Uninitialized,
			[]string{"[1000, 4096)"},
			func(p *program) {
				p.ok(p.a.Copy(p.x.Range(0, 1000), p.pinned.Range(0, 1000)))
				p.read(p.a, p.x)
			},
		},
		{
			"copy of unwritten memory", emulated.Uninitialized,
			[]string{"copy reads"},
			func(p *program) { p.copy(p.a, p.y, p.x) },
		},
		{
			"unwritten bytes that were copied", emulated.Uninitialized,
			[]string{`memory "y"`, "[1000, 4096)"},
			func(p *program) {
				p.ok(p.a.Copy(p.x.Range(0, 1000), p.pinned.Range(0, 1000)))
				p.copy(p.a, p.y, p.x)
				p.read(p.a, p.y)
			},
		},
		{
			"host reads unwritten memory", emulated.Uninitialized,
			[]string{"host read reads [0, 10)"},
			func(p *program) {
				mem, err := p.m.Alloc(device.Host, 10, "fresh")
				p.ok(err)
				mem.Read(0, 10)
				p.ok(mem.Free())
			},
		},
		{
			"copy after free", emulated.UseAfterFree,
			[]string{"host free", `stream "a" copy`, `memory "y"`},
			func(p *program) {
				r := p.all(p.y)
				p.ok(p.y.Free())
				p.y = nil
				if err := p.a.Copy(r, p.all(p.pinned)); err == nil {
					p.Error("a copy to freed memory was enqueued")
				}
			},
		},
		{
			"work after free", emulated.UseAfterFree,
			[]string{`launch "late"`},
			func(p *program) {
				r := p.all(p.y)
				p.ok(p.y.Free())
				p.y = nil
				if err := p.a.Execute(device.Work{Name: "late", Reads: []device.Range{r}}); err == nil {
					p.Error("work on freed memory was enqueued")
				}
			},
		},
		{
			"access after free", emulated.UseAfterFree,
			[]string{`launch "late"`, `memory "y"`, "[8, 16)"},
			func(p *program) {
				r := p.y.Range(8, 8)
				p.ok(p.y.Free())
				p.y = nil
				p.ok(p.a.Execute(device.Work{Name: "late", Run: func(a device.Access) error { a.Read(r); return nil }}))
			},
		},
		{
			"freed while a copy is queued", emulated.EarlyFree,
			[]string{`stream "a" copy writes`, "host free"},
			func(p *program) {
				p.ok(p.a.WaitFence(p.f, 1))
				p.copy(p.a, p.y, p.pinned)
				if err := p.y.Free(); err == nil {
					p.Error("memory was freed under a copy")
				}
				p.ok(p.f.Signal(1))
			},
		},
		{
			"freed while work is queued", emulated.EarlyFree,
			[]string{`launch "write"`},
			func(p *program) {
				p.ok(p.a.WaitFence(p.f, 1))
				p.write(p.a, p.y)
				if err := p.y.Free(); err == nil {
					p.Error("memory was freed under work")
				}
				p.ok(p.f.Signal(1))
			},
		},
		{
			"freed when it has ended and nobody knows", emulated.EarlyFree,
			[]string{`stream "a" launch "write"`},
			func(p *program) {
				p.write(p.a, p.y)
				p.ok(p.a.SignalFence(p.f, 1))
				for p.f.Value() != 1 {
					// Reading the counter orders nothing.
				}
				if err := p.y.Free(); err == nil {
					p.y = nil
				}
			},
		},
		{
			"range over two allocations", emulated.OutOfBounds,
			[]string{`launch "long"`},
			func(p *program) {
				r := device.Range{Addr: p.x.Range(0, 0).Addr, Bytes: 2 * programBytes}
				p.ok(p.a.Execute(device.Work{Name: "long", Run: func(a device.Access) error { a.Write(r); return nil }}))
			},
		},
		{
			"address of nothing", emulated.OutOfBounds,
			[]string{`launch "wild"`},
			func(p *program) {
				p.ok(p.a.Execute(device.Work{Name: "wild", Run: func(a device.Access) error {
					a.Read(device.Range{Addr: 4096, Bytes: 16})
					return nil
				}}))
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			for mode, o := range modes() {
				t.Run(mode, func(t *testing.T) {
					found := runProgram(t, o, c.run)
					if len(found) == 0 {
						t.Fatalf("nothing found; want: %s", c.kind)
					}
					for _, f := range found {
						if f.Kind == c.kind && says(f, c.says) {
							return
						}
					}
					t.Errorf("want a finding %q that says %q, found:", c.kind, c.says)
					for _, f := range found {
						t.Error(f)
					}
				})
			}
		})
	}
}

func says(f emulated.Finding, want []string) bool {
	for _, w := range want {
		if !strings.Contains(f.String(), w) {
			return false
		}
	}
	return true
}

// TestCheckAccepts runs programs without a mistake.
func TestCheckAccepts(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(*program)
	}{
		{"event", func(p *program) {
			p.write(p.a, p.x)
			p.ok(p.a.Record(p.e))
			p.ok(p.b.Wait(p.e))
			p.read(p.b, p.x)
			p.ok(p.b.Record(p.e))
			p.ok(p.a.Wait(p.e))
			p.write(p.a, p.x)
		}},
		{"reads beside each other", func(p *program) {
			p.write(p.a, p.x)
			p.sync(p.a)
			for range 3 {
				p.read(p.a, p.x)
				p.read(p.b, p.x)
				p.copy(p.c, p.y, p.x)
			}
		}},
		{"parts of one allocation", func(p *program) {
			for i, s := range []device.Stream{p.a, p.b, p.c} {
				p.ok(s.Copy(p.x.Range(int64(i)*100, 100), p.pinned.Range(0, 100)))
			}
		}},
		{"fence signaled before the wait", func(p *program) {
			p.write(p.a, p.x)
			p.ok(p.a.SignalFence(p.f, 1))
			p.ok(p.b.WaitFence(p.f, 1))
			p.read(p.b, p.x)
		}},
		{"fence signaled after the wait was enqueued", func(p *program) {
			p.ok(p.b.WaitFence(p.f, 1))
			p.read(p.b, p.x)
			p.ok(p.c.WaitFence(p.f, 1))
			p.read(p.c, p.x)
			p.write(p.a, p.x)
			p.ok(p.a.SignalFence(p.f, 1))
		}},
		{"a later value of the fence", func(p *program) {
			p.write(p.a, p.x)
			p.ok(p.a.SignalFence(p.f, 1))
			p.ok(p.b.WaitFence(p.f, 1))
			p.write(p.b, p.y)
			p.ok(p.b.SignalFence(p.f, 2))
			p.ok(p.c.WaitFence(p.f, 2))
			p.read(p.c, p.x)
			p.read(p.c, p.y)
		}},
		{"the host signals", func(p *program) {
			p.ok(p.a.WaitFence(p.f, 1))
			p.copy(p.a, p.x, p.pinned)
			p.pinned.Write(0, programBytes)
			p.ok(p.f.Signal(1))
			p.sync(p.a)
			p.pinned.Write(0, 1)
		}},
		{"the host waits", func(p *program) {
			p.write(p.a, p.x)
			p.copy(p.a, p.pinned, p.x)
			p.ok(p.a.SignalFence(p.f, 1))
			p.read(p.a, p.x)
			p.ok(p.f.Wait(p.Context(), 1))
			p.pinned.Read(0, programBytes)
		}},
		{"the host synchronizes with an event", func(p *program) {
			p.write(p.a, p.x)
			p.copy(p.a, p.pinned, p.x)
			p.ok(p.a.Record(p.e))
			p.read(p.a, p.x)
			p.ok(p.e.Synchronize(p.Context()))
			p.pinned.Write(0, programBytes)
		}},
		{"the host asks an event", func(p *program) {
			p.copy(p.a, p.x, p.pinned)
			p.ok(p.a.Record(p.e))
			for {
				done, err := p.e.Query()
				p.ok(err)
				if done {
					break
				}
			}
			p.pinned.Write(0, programBytes)
		}},
		{"the host carries over", func(p *program) {
			p.write(p.a, p.x)
			p.sync(p.a)
			p.read(p.b, p.x)
			p.sync(p.b)
			p.write(p.c, p.x)
		}},
		{"transitive", func(p *program) {
			e2, err := p.m.NewEvent()
			p.ok(err)
			p.write(p.a, p.x)
			p.ok(p.a.Record(p.e))
			p.ok(p.b.Wait(p.e))
			p.ok(p.b.SignalFence(p.f, 1))
			p.ok(p.host.WaitFence(p.f, 1))
			p.ok(p.host.Record(e2))
			p.ok(p.c.Wait(e2))
			p.write(p.c, p.x)
		}},
		{"an event recorded again", func(p *program) {
			for range 20 {
				p.write(p.a, p.x)
				p.ok(p.a.Record(p.e))
				p.ok(p.b.Wait(p.e))
				p.copy(p.b, p.y, p.x)
				p.ok(p.b.Record(p.e))
				p.ok(p.a.Wait(p.e))
			}
		}},
		{"work that acts on the host", func(p *program) {
			p.write(p.a, p.x)
			p.copy(p.a, p.pinned, p.x)
			p.ok(p.a.Record(p.e))
			p.ok(p.host.Wait(p.e))
			p.ok(p.host.Execute(device.Work{Name: "submit", Host: true, Run: func(device.Access) error {
				p.pinned.Read(0, 8)
				p.pinned.Write(0, 8)
				return p.b.Copy(p.all(p.y), p.all(p.pinned))
			}}))
			p.copy(p.host, p.z, p.pinned)
			p.sync(p.host)
			p.sync(p.b)
			p.pinned.Write(0, 8)
		}},
		{"a channel from work that acts on the host", func(p *program) {
			p.write(p.a, p.x)
			p.copy(p.a, p.pinned, p.x)
			p.ok(p.a.Record(p.e))
			p.ok(p.host.Wait(p.e))
			answer := make(chan bool, 1)
			p.ok(p.host.Execute(device.Work{Name: "answer", Host: true, Run: func(device.Access) error {
				answer <- true
				return nil
			}}))
			p.ok(p.host.SignalFence(p.f, 1))
			p.ok(p.f.Wait(p.Context(), 1))
			<-answer
			p.pinned.Read(0, programBytes)
		}},
		{"work enqueues and waits", func(p *program) {
			p.write(p.a, p.x)
			p.ok(p.a.Record(p.e))
			p.ok(p.host.Wait(p.e))
			p.ok(p.host.Execute(device.Work{Name: "nested", Run: func(device.Access) error {
				if err := p.b.Copy(p.all(p.y), p.all(p.x)); err != nil {
					return err
				}
				return p.b.Synchronize(p.Context())
			}}))
			p.write(p.host, p.y)
			p.write(p.host, p.x)
		}},
		{"work in place", func(p *program) {
			p.write(p.a, p.x)
			p.ok(p.a.Execute(device.Work{
				Name: "in place", Reads: []device.Range{p.all(p.x)}, Writes: []device.Range{p.all(p.x)},
				Run: func(a device.Access) error { a.Read(p.all(p.x)); a.Write(p.all(p.x)); return nil },
			}))
		}},
		{"a block that is partly filled travels whole", func(p *program) {
			p.ok(p.a.Copy(p.x.Range(0, 1000), p.pinned.Range(0, 1000)))
			p.copy(p.a, p.y, p.x)
			p.ok(p.a.Execute(device.Work{Name: "read", Reads: []device.Range{p.y.Range(0, 1000)}}))
			p.ok(p.a.Copy(p.x.Range(2000, 500), p.x.Range(0, 500)))
		}},
		{"a stream closed and another made", func(p *program) {
			for range 5 {
				s := stream(p.T, p.m, device.HBM(0), "short")
				p.write(s, p.x)
				p.ok(s.Close())
			}
			p.write(p.a, p.x)
		}},
		{"free behind the last use", func(p *program) {
			p.write(p.a, p.y)
			p.ok(p.a.Record(p.e))
			p.ok(p.e.Synchronize(p.Context()))
			p.ok(p.y.Free())
			p.y = nil
		}},
		{"recovery", func(p *program) {
			p.tolerated = true
			p.write(p.a, p.x)
			p.ok(p.a.Execute(device.Work{Name: "fail", Run: func(device.Access) error { return context.Canceled }}))
			p.write(p.a, p.x)
			if err := p.a.Recover(p.Context()); err == nil {
				p.Error("no error to recover from")
			}
			p.write(p.b, p.x)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for mode, o := range modes() {
				t.Run(mode, func(t *testing.T) {
					for _, f := range runProgram(t, o, c.run) {
						t.Error(f)
					}
				})
			}
		})
	}
}

// TestCheckFailsClose: without Report, Close tells.
func TestCheckFailsClose(t *testing.T) {
	m, err := emulated.New(emulated.Options{Check: true, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	mem, err := m.Alloc(device.Host, 64, "never written")
	if err != nil {
		t.Fatal(err)
	}
	mem.Read(0, 64)
	if err := mem.Free(); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err == nil || !strings.Contains(err.Error(), `memory "never written" on host: host read reads [0, 64)`) {
		t.Errorf("Close: %v", err)
	}
}
