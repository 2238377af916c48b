package engine

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"
)

// TestSlowReaderHoldsWhatWaits: a job's memory is that of the news that wait, not of all that
// its reader has read.
func TestSlowReaderHoldsWhatWaits(t *testing.T) {
	j := newJob(time.Time{}, 1)
	const behind = 5
	for i := range 1000 {
		j.deliver(&delivery{pendingUpdate: pendingUpdate{hasToken: true, token: Token{ID: int32(i)}}})
		if i < behind {
			continue
		}
		u, err := j.Next(t.Context())
		if err != nil || len(u.Tokens) != 1 || u.Tokens[0].ID != int32(i-behind) {
			t.Fatalf("read %+v, %v behind token %d", u, err, i)
		}
	}
	if n := cap(j.updates); n > 8*behind {
		t.Errorf("room for %d where %d wait", n, behind)
	}
	for i := range j.updates[:cap(j.updates)] {
		if n := &j.updates[:cap(j.updates)][i]; n.hasToken && (i < j.read || i >= len(j.updates)) {
			t.Errorf("token %d was read and is still held", n.token.ID)
		}
	}
}

// TestEndsWithItsLastUpdate: a reader of a job's last update finds the job ended.
func TestEndsWithItsLastUpdate(t *testing.T) {
	now := time.Now()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, why := range []error{nil, errors.New("the device is gone")} {
		j := newJob(now, 1)
		j.deliver(&delivery{pendingUpdate: pendingUpdate{hasToken: true, finish: FinishLength, at: now}, last: true, err: why})
		if u, err := j.Next(canceled); err != nil || u.Finish != FinishLength {
			t.Errorf("the last update is %+v, %v", u, err)
		}
		want := why
		if want == nil {
			want = io.EOF
		}
		if _, err := j.Next(canceled); !errors.Is(err, want) || !j.Times().Finished.Equal(now) || j.Usage().CompletionTokens != 1 {
			t.Errorf("behind it come %v, %+v, %+v", err, j.Times(), j.Usage())
		}
	}
}
