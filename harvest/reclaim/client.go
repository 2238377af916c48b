package reclaim

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/moeserve/moeserve/untrusted"
)

// Client asks the processes of this machine, or one by its address.
type Client struct {
	// Dir has the sockets of the processes.
	Dir string
	// Except is the path of a socket that is not asked: the process's own.
	Except string
	// URL of a process's admin address, in place of Dir; Key is sent to it.
	URL, Key string
}

// Report is what all processes together have released.
type Report struct {
	Answer
	// Processes that borrow from the device.
	Processes int
}

// Met reports whether that many bytes are free now.
func (r Report) Met(bytes int64) bool { return r.Free >= bytes }

// errGone: a socket's process has ended.
var errGone = errors.New("the process has ended")

// process is one that can be asked.
type process struct {
	name   string
	http   *http.Client
	url    string
	key    string
	device Borrowed // that is asked for
}

// Reclaim asks for memory: each process gives a share of what is missing in proportion to
// what it has borrowed of the device, and what one cannot give in time is asked of the next.
// All of them are asked, so that none borrows what another has released. Without a process
// that borrows from the device the report has none. An error names the processes that could
// not be asked.
func (c Client) Reclaim(ctx context.Context, ask Request) (Report, error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, ask.Within+grace)
	defer cancel()
	all, failed := c.find(ctx, ask.Device)
	if len(all) == 0 {
		return Report{}, failed
	}
	// Those that hold most last: they make up for the others.
	slices.SortStableFunc(all, func(a, b process) int { return cmp.Compare(a.device.Borrowed, b.device.Borrowed) })
	var held, given int64
	for _, p := range all {
		held += p.device.Borrowed
	}
	free := all[0].device.Free
	missing := min(max(ask.Bytes-free, 0), held)
	r := Report{Answer: Answer{Device: all[0].device.Device, UUID: all[0].device.UUID, Free: free}, Processes: len(all)}
	var late []string
	for i, p := range all {
		one := ask
		if given += p.device.Borrowed; i < len(all)-1 && held > 0 {
			one.Bytes = max(free+int64(float64(missing)*(float64(given)/float64(held))), 1)
		}
		one.Within = max(ask.Within-time.Since(begin), time.Millisecond)
		var a Answer
		if err := p.call(ctx, http.MethodPost, Path, one, &a); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", p.name, err))
			continue
		}
		r.Freed += a.Freed
		r.Free, r.Borrowed = a.Free, r.Borrowed+a.Borrowed
		if a.Late != "" {
			late = append(late, untrusted.Line(a.Late))
		}
	}
	r.Late = strings.Join(late, "; ")
	r.TookMS = float64(time.Since(begin)) / float64(time.Millisecond)
	return r, failed
}

// grace is what a process may be late with its answer.
const grace = 2 * time.Second

// Borrowed lists what each process has borrowed of each device. An error names the processes
// that could not be asked.
func (c Client) Borrowed(ctx context.Context) (all [][]Borrowed, failed error) {
	failed = c.each(ctx, func(_ process, b []Borrowed) { all = append(all, b) })
	return all, failed
}

// find lists the processes that borrow from a device.
func (c Client) find(ctx context.Context, device string) (all []process, failed error) {
	failed = c.each(ctx, func(p process, b []Borrowed) {
		if i := slices.IndexFunc(b, func(b Borrowed) bool { return Names(device, b.Device, b.UUID) }); i >= 0 {
			p.device = b[i]
			all = append(all, p)
		}
	})
	return all, failed
}

// each asks all processes what they have borrowed.
func (c Client) each(ctx context.Context, visit func(process, []Borrowed)) (failed error) {
	candidates, err := c.processes()
	if err != nil {
		return err
	}
	for _, p := range candidates {
		var b struct {
			Devices []Borrowed `json:"devices"`
		}
		switch err := p.call(ctx, http.MethodGet, BorrowedPath, nil, &b); {
		case errors.Is(err, errGone):
		case err != nil:
			failed = errors.Join(failed, fmt.Errorf("%s: %w", p.name, err))
		default:
			visit(p, b.Devices)
		}
	}
	return failed
}

// processes lists those that may be asked.
func (c Client) processes() ([]process, error) {
	if c.URL != "" {
		return []process{{name: c.URL, http: http.DefaultClient, url: strings.TrimSuffix(c.URL, "/"), key: c.Key}}, nil
	}
	if err := checkDir(c.Dir); errors.Is(err, os.ErrNotExist) {
		return nil, nil // nobody has ever listened
	} else if err != nil {
		return nil, fmt.Errorf("reclaim: %w", err)
	}
	files, err := os.ReadDir(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("reclaim: %w", err)
	}
	var all []process
	for _, f := range files {
		if f.Type() != os.ModeSocket || !strings.HasSuffix(f.Name(), suffix) {
			continue
		}
		path := filepath.Join(c.Dir, f.Name())
		if path == c.Except {
			continue
		}
		all = append(all, process{name: path, url: "http://moeserve", http: &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			},
		}}})
	}
	return all, nil
}

// call sends a request, and decodes its answer.
func (p *process) call(ctx context.Context, method, path string, body, to any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, p.url+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	if p.key != "" {
		r.Header.Set("Authorization", "Bearer "+p.key)
	}
	res, err := p.http.Do(r)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) && p.url == "http://moeserve" || errors.Is(err, os.ErrNotExist) {
			return errGone
		}
		return err
	}
	defer res.Body.Close() //nolint:errcheck // only read from
	if text, err = io.ReadAll(io.LimitReader(res.Body, 1<<20)); err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		var f failure
		if json.Unmarshal(text, &f) != nil || f.Error.Message == "" {
			f.Error.Message = res.Status
		}
		return errors.New(untrusted.Line(f.Error.Message))
	}
	return json.Unmarshal(text, to)
}
