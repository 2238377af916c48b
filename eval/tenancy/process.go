package tenancy

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"

	"github.com/moeserve/moeserve/untrusted"
)

// Process is a tenant that is a process of its own. It reads requests from its standard input, a JSON
// object on a line each, and answers each of them with one on its standard output:
//
//	{"hold": 8589934592}                     {"held": 8589934592, "ms": 91.5}
//	{"hold": 99999999999999}                 {"refused": true, "ms": 12.1}
//	{"work": "bf16 product", "seconds": 2}   {"rate": 7.7e14}
//
// Its first line is {"ready": true}. It ends when its input does. tools/cuda/tenant.py is one.
type Process struct {
	command *exec.Cmd
	in      io.WriteCloser
	answers chan answer
	pending bool
}

// answer is a line of the process.
type answer struct {
	Ready   bool    `json:"ready"`
	Held    int64   `json:"held"`
	MS      float64 `json:"ms"`
	Refused bool    `json:"refused"`
	Rate    float64 `json:"rate"`
	Error   string  `json:"error"`
	err     error
}

// StartProcess starts a tenant with the shell's command line, and waits until it is ready. log receives
// what it writes to its standard error. The caller closes it.
func StartProcess(ctx context.Context, command string, log io.Writer) (*Process, error) {
	p := &Process{command: exec.CommandContext(ctx, "sh", "-c", command), answers: make(chan answer, 1)}
	p.command.Stderr = log
	p.command.WaitDelay = 10 * time.Second
	var err error
	if p.in, err = p.command.StdinPipe(); err != nil {
		return nil, fmt.Errorf("tenancy: %w", err)
	}
	out, err := p.command.StdoutPipe()
	if err == nil {
		err = p.command.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("tenancy: start %q: %w", command, err)
	}
	go p.read(out)
	select {
	case a := <-p.answers:
		if !a.Ready {
			return nil, errors.Join(fmt.Errorf("tenancy: the tenant %q did not say {\"ready\": true}", command), a.failure(), p.Close())
		}
	case <-ctx.Done():
		return nil, errors.Join(fmt.Errorf("tenancy: the tenant %q did not say {\"ready\": true} so far: %w", command, ctx.Err()), p.Close())
	}
	return p, nil
}

// read reads answers until the process ends.
func (p *Process) read(out io.Reader) {
	defer close(p.answers)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var a answer
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			a.err = fmt.Errorf("tenancy: the tenant's answer %q: %w", lines.Text(), untrusted.JSONError(lines.Bytes(), err))
		}
		p.answers <- a
	}
	p.answers <- answer{err: errors.Join(errors.New("tenancy: the tenant has ended"), lines.Err())}
}

func (a *answer) failure() error {
	if a.err == nil && a.Error != "" {
		return fmt.Errorf("tenancy: the tenant failed: %s", a.Error)
	}
	return a.err
}

func (p *Process) ask(request map[string]any) error {
	text, err := json.Marshal(request)
	if err == nil {
		_, err = p.in.Write(append(text, '\n'))
	}
	if err != nil {
		return fmt.Errorf("tenancy: ask the tenant: %w", err)
	}
	return nil
}

// Hold implements Tenant. It waits for the answer to the last one first.
func (p *Process) Hold(bytes int64) error {
	if p.pending {
		a := <-p.answers
		p.pending = false
		if err := a.failure(); err != nil {
			return err
		}
	}
	p.pending = true
	return p.ask(map[string]any{"hold": bytes})
}

// Advance implements Tenant.
func (p *Process) Advance() (done bool, took time.Duration, refused bool, err error) {
	if !p.pending {
		return true, 0, false, nil
	}
	select {
	case a := <-p.answers:
		p.pending = false
		return !a.Refused, time.Duration(a.MS * float64(time.Millisecond)), a.Refused, a.failure()
	default:
		return false, 0, false, nil
	}
}

// Work implements Tenant.
func (p *Process) Work(ctx context.Context, kind string, d time.Duration) (float64, error) {
	if err := p.ask(map[string]any{"work": kind, "seconds": d.Seconds()}); err != nil {
		return 0, err
	}
	select {
	case a := <-p.answers:
		return a.Rate, a.failure()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// Close ends the process, and waits for it.
func (p *Process) Close() error {
	err := p.in.Close()
	for range p.answers { // until it has ended
	}
	return errors.Join(err, p.command.Wait())
}
