// Command moeserve runs mixture-of-experts models whose experts do not all fit in
// the memory of the device that computes.
//
// This package is the commands: it reads flags, variables and files into
// configs.Settings, hands these to package node, and prints what comes back. It
// alone knows cobra and viper. Completions and results go to standard output, everything
// else to standard error; errors are one line.
//
// # Invariants
//
//   - The exit code says what failed: see exitCode.
//   - A command that fails leaves no file behind; a benchmark leaves what it has measured,
//     also where it is interrupted, or nobody reads its standard output. A trace stays, too.
package main

import (
	"cmp"
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/server"
)

func main() {
	os.Exit(moeserve())
}

// moeserve runs the command that the process was started with and returns its exit
// code.
func moeserve() int {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s := &streams{in: os.Stdin, out: os.Stdout, err: newConsole(os.Stderr)}
	signals := make(chan os.Signal, 1)
	// Shells without job control, as those of scripts, start commands behind & with SIGINT ignored.
	ignored := signal.Ignored(os.Interrupt) || signal.Ignored(syscall.SIGTERM)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		for sig := range signals {
			switch {
			case sig == os.Interrupt && s.interrupts.raise():
				continue
			case ctx.Err() != nil:
				os.Exit(exitInterrupted)
			case !ignored:
				signal.Stop(signals) // a second signal ends the process at once
			}
			cancel()
		}
	}()
	return execute(ctx, s, os.Args[1:])
}

// streams are a process's standard streams, its command line and its clock, and the
// interrupts that its terminal sends.
type streams struct {
	in       io.Reader
	out, err io.Writer
	// args are the command line without the program's name.
	args []string
	// now is the time. Default: time.Now.
	now        func() time.Time
	interrupts interrupts
	// outputs are the files that flags name.
	outputs []namedFile
	// help is the error of printing help.
	help error
}

// namedFile is a file and the flag that names it.
type namedFile struct{ flag, path string }

// interrupts are SIGINTs: they end the process, unless a handler takes them (chat stops a completion).
type interrupts struct {
	mu     sync.Mutex
	handle func()
}

// during has handle called for each interrupt, from another goroutine, until restore is
// called.
func (i *interrupts) during(handle func()) (restore func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.handle = handle
	return func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.handle = nil
	}
}

// raise reports whether a handler has taken the interrupt.
func (i *interrupts) raise() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.handle == nil {
		return false
	}
	i.handle()
	return true
}

func (s *streams) clock() func() time.Time {
	if s.now == nil {
		return time.Now
	}
	return s.now
}

// interactive reports whether a stream is a terminal.
func interactive(stream any) bool {
	if _, ok := stream.(*console); ok {
		return true
	}
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// execute runs one command line and returns the exit code.
func execute(ctx context.Context, s *streams, args []string) int {
	s.args = args
	root := newRoot(s)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err = cmp.Or(err, s.help); err == nil {
		return exitDone
	}
	code := exitCode(err)
	if code == exitInterrupted {
		err = errors.New("interrupted")
	}
	message := oneLine(err)
	if logsJSON(cmd) {
		slog.New(slog.NewJSONHandler(s.err, nil)).Error(message, "exit_code", code)
		return code
	}
	if _, err := fmt.Fprintf(s.err, "moeserve: %s\n", message); err != nil {
		return max(code, exitFailed)
	}
	return code
}

// oneLine is an error as a person reads it.
func oneLine(err error) string {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		err = errors.New(strings.ReplaceAll(err.Error(), wrong.Error(), plainJSON(wrong)))
	}
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		text := fmt.Sprintf("it is not JSON from byte %d on", syntax.Offset)
		if syntax.Error() == "unexpected end of JSON input" {
			text = "it is not JSON: it ends too early"
		}
		err = errors.New(strings.ReplaceAll(err.Error(), syntax.Error(), text))
	}
	return server.Message(err)
}

// plainJSON words a value of the wrong kind without the names of types in Go.
func plainJSON(wrong *json.UnmarshalTypeError) string {
	is, number, _ := strings.Cut(wrong.Value, " ")
	switch is {
	case "number":
		is = cmp.Or(number, "a number")
	case "bool":
		is = "true or false"
	case "string":
		is = "a text"
	case "array":
		is = "a list"
	case "object":
		is = "an object"
	}
	want := "an object"
	switch kind := wrong.Type.Kind(); {
	case kind == reflect.String || reflect.PointerTo(wrong.Type).Implements(reflect.TypeFor[encoding.TextUnmarshaler]()):
		want = "a text"
	case kind == reflect.Bool:
		want = "true or false"
	case kind == reflect.Float32 || kind == reflect.Float64:
		want = "a number"
	case kind >= reflect.Int && kind <= reflect.Uint64:
		want = "a whole number"
	case kind == reflect.Slice || kind == reflect.Array:
		want = "a list"
	}
	text := fmt.Sprintf("%s where %s belongs", is, want)
	// Keys have no capital letters; embedded types have.
	keys := slices.DeleteFunc(strings.Split(wrong.Field, "."), func(key string) bool { return key != strings.ToLower(key) })
	if field := strings.Join(keys, "."); field != "" {
		text = field + ": " + text
	}
	return text
}

// logsJSON says whether standard error of a command is JSON, line by line: then so is the error
// that ends it.
func logsJSON(cmd *cobra.Command) bool {
	f := cmd.Flags().Lookup("log-format")
	if f == nil {
		return false
	}
	if set, err := readSettings(cmd.Flags(), os.Environ()); err == nil {
		return set.Output.LogFormat == configs.LogJSON
	}
	// Of settings that are wrong, this one may be right.
	text := f.Value.String()
	if k, ok := configs.Find(f.Name); ok && !f.Changed {
		text = os.Getenv(k.Variable())
	}
	return text == configs.LogJSON.String()
}

// Exit codes.
const (
	exitDone        = 0
	exitFailed      = 1 // while running, or inspect's answer
	exitUsage       = 2 // the command line, the configuration, or the prompt
	exitModel       = 3
	exitDevice      = 4
	exitInterrupted = 130 // as shells have it: 128 and the number of SIGINT
)

// usageError is a mistake on the command line or in the configuration.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

func exitCode(err error) int {
	var usage *usageError
	is := func(targets ...error) bool {
		return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
	}
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case is(context.Canceled):
		return exitInterrupted
	case is(fault.ErrConfig, engine.ErrPromptTooLong, engine.ErrBadRequest):
		return exitUsage
	case is(fault.ErrModel):
		return exitModel
	case is(fault.ErrDevice, fault.ErrLost):
		return exitDevice
	}
	return exitFailed
}
