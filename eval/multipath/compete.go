package multipath

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/moeserve/moeserve/device"
)

// Competitor copies between its own host memory and one GPU, over that GPU's link, in another
// process: a GPU's copy engines serve the streams of one process one after the other, those of several
// processes in turn.
type Competitor interface {
	// Start has it copy in a direction until Stop.
	Start(ctx context.Context, d Direction) error
	// Bytes is what it has copied since it was made.
	Bytes(ctx context.Context) (int64, error)
	// Stop returns when it no longer copies.
	Stop(ctx context.Context) error
	// Close ends it.
	Close() error
}

// The commands of Compete, a line each; every one is answered by a line.
const (
	stopCommand  = "stop"
	bytesCommand = "bytes"
)

// competeDepth is the number of copies that a competitor has in flight, so that its link is never idle.
const competeDepth = 2

// Compete is a competitor's process. It reads commands from in until it ends: a direction begins
// copies, stop ends them, bytes asks how many bytes were copied. Each line is answered by the number of bytes
// so far. Of o it uses Machine, GPU and LinkBytes.
func Compete(ctx context.Context, o Options, in io.Reader, out io.Writer) (err error) {
	o = o.EnsureDefaults()
	o.Relays = nil
	r := newRig(o)
	defer func() {
		if closed := r.close(); err == nil {
			err = closed
		}
	}()
	host, err := r.o.Machine.Alloc(device.Host, o.LinkBytes, "competitor")
	if err != nil {
		return err
	}
	r.closers = append(r.closers, host.Free)
	gpu, err := r.o.Machine.Alloc(o.GPU, o.LinkBytes, "competitor")
	if err != nil {
		return err
	}
	r.closers = append(r.closers, gpu.Free)
	if r.keepsData() {
		fill(host.Write(0, o.LinkBytes), 0)
	}
	stream, err := r.stream(o.GPU, "competitor")
	if err != nil {
		return err
	}
	if err := stream.Copy(gpu.Range(0, o.LinkBytes), host.Range(0, o.LinkBytes)); err != nil { // so that either may be read
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	c := &copier{rig: r, stream: stream, host: host, gpu: gpu}
	defer func() {
		if stopped := c.stop(); err == nil {
			err = stopped
		}
	}()
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		switch text := lines.Text(); text {
		case stopCommand:
			err = c.stop()
		case bytesCommand:
			err = c.failure()
		case string(ToGPU), string(FromGPU):
			if err = c.stop(); err == nil {
				c.start(ctx, Direction(text))
			}
		default:
			err = fmt.Errorf("multipath: invalid command %q to a competitor: must be %s, %s, %s or %s", text, ToGPU, FromGPU, stopCommand, bytesCommand)
		}
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out, c.bytes()); err != nil {
			return err
		}
	}
	return lines.Err()
}

// copier copies in a goroutine of its own, from start to stop.
type copier struct {
	*rig
	stream    device.Stream
	host, gpu device.Memory
	quit      chan struct{}
	ended     chan struct{}

	mu     sync.Mutex // guards what follows
	copied int64
	err    error
}

func (c *copier) start(ctx context.Context, d Direction) {
	c.quit, c.ended = make(chan struct{}), make(chan struct{})
	go func() {
		defer close(c.ended)
		if err := c.run(ctx, d); err != nil {
			c.mu.Lock()
			c.err = err
			c.mu.Unlock()
		}
	}()
}

// run keeps competeDepth copies in flight until quit is closed, and waits for the last.
func (c *copier) run(ctx context.Context, d Direction) error {
	dst, src := c.gpu.Range(0, c.gpu.Bytes()), c.host.Range(0, c.host.Bytes())
	if d == FromGPU {
		dst, src = src, dst
	}
	wait := func(n int) error {
		e, err := c.event(n % competeDepth)
		if err == nil {
			err = e.Synchronize(ctx)
		}
		if err == nil {
			c.mu.Lock()
			c.copied += dst.Bytes
			c.mu.Unlock()
		}
		return err
	}
	enqueue := func(n int) error {
		e, err := c.event(n % competeDepth)
		if err == nil {
			err = c.stream.Copy(dst, src)
		}
		if err == nil {
			err = c.stream.Record(e)
		}
		return err
	}
	done, n := 0, 0
	for going := true; going || done < n; {
		var err error
		if going && n-done < competeDepth {
			err = enqueue(n)
			n++
		} else {
			err = wait(done)
			done++
		}
		if err != nil {
			return err
		}
		select {
		case <-c.quit:
			going = false
		default:
		}
	}
	return nil
}

func (c *copier) stop() error {
	if c.quit != nil {
		close(c.quit)
		<-c.ended
		c.quit = nil
	}
	return c.failure()
}

func (c *copier) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *copier) bytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.copied
}

// Remote is a Competitor that is the process at the other end of two pipes, which runs Compete.
type Remote struct {
	// Commands go to its standard input, Answers come from its standard output.
	Commands io.WriteCloser
	Answers  io.Reader
	// Wait returns when it has ended, after Commands were closed.
	Wait func() error

	lines *bufio.Scanner
}

// Start implements Competitor.
func (r *Remote) Start(_ context.Context, d Direction) error { return r.tell(string(d)) }

// Stop implements Competitor.
func (r *Remote) Stop(context.Context) error { return r.tell(stopCommand) }

// Bytes implements Competitor.
func (r *Remote) Bytes(context.Context) (n int64, err error) { return r.ask(bytesCommand) }

// Close implements Competitor.
func (r *Remote) Close() error {
	err := r.Commands.Close()
	if ended := r.Wait(); ended != nil {
		return fmt.Errorf("multipath: the competitor's process: %w", ended)
	}
	return err
}

func (r *Remote) tell(command string) error {
	_, err := r.ask(command)
	return err
}

func (r *Remote) ask(command string) (n int64, err error) {
	if r.lines == nil {
		r.lines = bufio.NewScanner(r.Answers)
	}
	if _, err := fmt.Fprintln(r.Commands, command); err != nil {
		return 0, fmt.Errorf("multipath: the competitor's process: %w", err)
	}
	if !r.lines.Scan() {
		return 0, fmt.Errorf("multipath: the competitor's process has ended before it answered %q: its messages say why", command)
	}
	if _, err := fmt.Sscan(r.lines.Text(), &n); err != nil {
		return 0, fmt.Errorf("multipath: the competitor's process answered %q with %q: must be a number of bytes", command, r.lines.Text())
	}
	return n, nil
}
