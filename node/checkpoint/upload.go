package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/moeserve/moeserve/device"
)

// uploader copies host bytes to device memory through a few pinned staging buffers: one is
// filled while another is copied. Several goroutines may use it.
type uploader struct {
	pinned device.Memory
	size   int64
	free   chan int
	events []device.Event

	mu     sync.Mutex // guards stream
	stream device.Stream
}

const (
	uploadBuffers = 4
	bufferBytes   = 4 << 20
	// UploadBytes is the pinned memory of the staging buffers, in addition to the expert
	// store's.
	UploadBytes = uploadBuffers * bufferBytes
)

// newUploader allocates UploadBytes of pinned memory.
func newUploader(m device.Machine, space device.Space) (u *uploader, err error) {
	u = &uploader{size: bufferBytes, free: make(chan int, uploadBuffers)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("node: upload buffers: %w", err), u.close(context.Background()))
		}
	}()
	if u.stream, err = m.NewStream(space, device.StreamOptions{Name: "upload"}); err != nil {
		return u, err
	}
	if u.pinned, err = m.Alloc(device.Host, uploadBuffers*u.size, "upload buffers, pinned"); err != nil {
		return u, err
	}
	for i := range uploadBuffers {
		ev, err := m.NewEvent()
		if err != nil {
			return u, err
		}
		u.events = append(u.events, ev)
		if err := u.stream.Record(ev); err != nil {
			return u, err
		}
		u.free <- i
	}
	return u, nil
}

// put copies data to dst; the copy may still be running when put returns.
func (u *uploader) put(ctx context.Context, dst device.Range, data []byte) error {
	for len(data) > 0 {
		var i int
		select {
		case i = <-u.free:
		case <-ctx.Done():
			return ctx.Err()
		}
		n := min(int64(len(data)), u.size)
		err := u.send(ctx, i, dst.Slice(0, n), data[:n])
		u.free <- i
		if err != nil {
			return err
		}
		dst, data = dst.Slice(n, dst.Bytes-n), data[n:]
	}
	return nil
}

func (u *uploader) send(ctx context.Context, i int, dst device.Range, data []byte) error {
	if err := u.events[i].Synchronize(ctx); err != nil {
		return err
	}
	off, n := int64(i)*u.size, int64(len(data))
	copy(u.pinned.Write(off, n), data)
	u.mu.Lock()
	defer u.mu.Unlock()
	if err := u.stream.Copy(dst, u.pinned.Range(off, n)); err != nil {
		return err
	}
	return u.stream.Record(u.events[i])
}

// flush waits until all copies of put are complete.
func (u *uploader) flush(ctx context.Context) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.stream.Synchronize(ctx)
}

func (u *uploader) close(ctx context.Context) error {
	var errs []error
	if u.stream != nil {
		// put or flush has reported the error already, or loading was aborted.
		_ = u.stream.Recover(context.WithoutCancel(ctx))
		errs = append(errs, u.stream.Close())
	}
	for _, ev := range u.events {
		errs = append(errs, ev.Close())
	}
	if u.pinned != nil {
		errs = append(errs, u.pinned.Free())
	}
	return errors.Join(errs...)
}
