package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/planner"
)

// maxPromptBytes bounds a prompt on standard input: more than the longest context
// of any preset can hold.
const maxPromptBytes = 16 << 20

// runOptions are the flags of run alone.
type runOptions struct {
	promptIDs string
	quiet     bool
	verbose   bool
}

func newRun(s *streams) *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run [PROMPT]",
		Short: "Generate once",
		Long: `Generate once, and tell where experts were and what moved.

Without --model, the small model that is built in answers. The prompt is taken as
it stands, with the special tokens that the tokenizer puts around a prompt; --chat
puts it through the model's chat template instead. Without PROMPT, or with -, it
is read from standard input, less one line end at its end.

The answer goes to standard output as it comes, the report behind it to standard
error.`,
		Example: `  moeserve run --offload-fraction 0.5 'sort: t h e m o e ='
  moeserve run --model /models/mixtral-8x7b --chat 'Why is the sky blue?'
  moeserve run --model qwen1.5-moe-a2.7b --load-format dummy --num-hidden-layers 2 --prompt-ids 1,2,3`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("one PROMPT, please, and there are %d: put it in quotes", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return run(cmd.Context(), s, set, &o, args)
		},
	}
	addSettings(cmd.Flags(), configs.For("run"))
	cmd.Flags().StringVar(&o.promptIDs, "prompt-ids", "", "prompt as token `IDS`, separated by commas, in place of PROMPT")
	cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "print the answer only")
	cmd.Flags().BoolVarP(&o.verbose, "verbose", "v", false, "print all of the report: every link, stalls, placement by layer")
	return cmd
}

// prompt is what to go on from: text, or ids, which text has too once it is encoded.
type prompt struct {
	text string
	ids  []int32
	// encoded says that a tokenizer made the ids.
	encoded bool
}

// workload is what a policy is made for. How many tokens a text has is known only once
// there is a tokenizer: hardly ever more than one for every two bytes, and what a
// template puts around them.
func (p *prompt) workload(set *settings) planner.Workload {
	tokens := len(p.ids)
	if p.ids == nil {
		tokens = len(p.text)/2 + 32
	}
	return planner.Workload{PromptTokens: tokens, NewTokens: set.Generate.MaxTokens, Requests: 1}
}

// readPrompt finds the prompt in arguments, flags or standard input.
func readPrompt(ctx context.Context, in io.Reader, set *settings, o *runOptions, args []string) (*prompt, error) {
	if o.promptIDs != "" {
		if len(args) > 0 {
			return nil, usagef("a PROMPT and --prompt-ids: give one of them")
		}
		if set.Generate.Chat {
			return nil, usagef("--chat is for text: it does not go with --prompt-ids")
		}
		ids, err := parseIDs(o.promptIDs)
		return &prompt{ids: ids}, err
	}
	if _, ok := configs.Preset(set.Model.Name); ok {
		return nil, usagef("the preset %s has no tokenizer: give the prompt as token ids (--prompt-ids 1,2,3)", set.Model.Name)
	}
	if len(args) > 0 && args[0] != stdoutName {
		return &prompt{text: args[0]}, nil
	}
	if len(args) == 0 && interactive(in) {
		return nil, usagef("no prompt: give it as an argument, or on standard input")
	}
	data, err := readAll(ctx, io.LimitReader(in, maxPromptBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read the prompt: %w", err)
	}
	if len(data) > maxPromptBytes {
		return nil, usagef("the prompt on standard input is longer than %s", sizing.Bytes(maxPromptBytes))
	}
	text := strings.TrimSuffix(string(data), "\n")
	return &prompt{text: strings.TrimSuffix(text, "\r")}, nil
}

// readAll reads to the end, or until ctx is done. Nothing ends a read that waits
// for a terminal: its goroutine then ends with its reader, or with the process.
func readAll(ctx context.Context, in io.Reader) ([]byte, error) {
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		data, err := io.ReadAll(in)
		done <- result{data, err}
	}()
	select {
	case r := <-done:
		return r.data, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func parseIDs(list string) ([]int32, error) {
	fields := strings.Split(list, ",")
	ids := make([]int32, len(fields))
	for i, f := range fields {
		id, err := strconv.ParseInt(strings.TrimSpace(f), 10, 32)
		if err != nil || id < 0 {
			return nil, usagef("--prompt-ids: %q is not a token id; give whole numbers from 0, separated by commas", f)
		}
		ids[i] = int32(id)
	}
	return ids, nil
}

func run(ctx context.Context, s *streams, set *settings, o *runOptions, args []string) (err error) {
	p, err := readPrompt(ctx, s.in, set, o, args)
	if err != nil {
		return err
	}
	res, err := openResult(set.Output.JSON, s.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()

	opts := node.Options{Settings: set.Settings, Explicit: set.given, Workload: p.workload(set), Log: set.logger(s.err)}
	if p.ids != nil && set.Model.Name != "" {
		// Ids need no tokenizer, but where there is one it gives their text.
		_, err := os.Stat(filepath.Join(set.Model.Name, "tokenizer.json"))
		opts.WithoutTokenizer = errors.Is(err, fs.ErrNotExist)
	}
	n, err := open(ctx, s, opts, o.quiet)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	set.Settings = n.Info().Settings

	if p.ids == nil {
		if p.ids, err = n.Text().Encode(p.text, set.Generate.Chat); err != nil {
			return err
		}
		p.encoded = true
	}
	text := io.Discard
	if !res.onStdout() {
		text = s.out
	}
	loaded, err := n.Observe().Report(ctx)
	if err != nil {
		return err
	}
	a, err := generate(ctx, n, set, p, text)
	if err != nil {
		return err
	}
	done, err := n.Observe().Report(ctx)
	if err != nil {
		return err
	}
	r := newRunResult(a, &loaded, &done)
	if !o.quiet {
		if err := printReport(s.err, r, o.verbose, n.Text().Tokenizer != nil); err != nil {
			return err
		}
	}
	return res.write(r)
}

// open opens a node, and shows the progress of loading.
func open(ctx context.Context, s *streams, o node.Options, quiet bool) (*node.Node, error) {
	p := s.progress(&o.Settings.Output, quiet)
	defer p.end()
	const what = "loading"
	p.begin(what, bytesUnit)
	o.Progress = func(done, total int64) { p.set(what, done, total) }
	return node.Open(ctx, o)
}

// answer is what was generated, and when.
type answer struct {
	prompt, ids []int32
	text        string
	finish      engine.FinishReason
	// prefill is the time to the first token, decode the time from there to the last.
	prefill, decode time.Duration
}

// generate runs the prompt and streams the answer's text to out.
func generate(ctx context.Context, n *node.Node, set *settings, from *prompt, out io.Writer) (*answer, error) {
	a := &answer{prompt: from.ids}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var broken error // of out
	say := func(s string) {
		if broken != nil || s == "" {
			return
		}
		if _, broken = io.WriteString(out, s); broken != nil {
			stop(broken)
		}
	}
	p := engine.DefaultParams()
	p.MaxTokens, p.Temperature = set.Generate.MaxTokens, float32(set.Generate.Temperature)
	p.Seed, p.IgnoreEOS = set.Generate.Seed, set.Generate.IgnoreEOS
	start := time.Now()
	var first, last time.Time
	outs, err := n.Engine().Generate(ctx, []engine.Request{{Prompt: from.ids, Encoded: from.encoded, Params: p}}, func(_ int, u engine.Update) {
		last = time.Now()
		if first.IsZero() {
			first = last
		}
		say(u.Text)
	})
	if !first.IsZero() && n.Text().Tokenizer != nil {
		say("\n")
	}
	if broken != nil {
		return nil, fmt.Errorf("write the answer: %w", broken)
	}
	if err != nil {
		return nil, err
	}
	a.ids, a.finish, a.text = outs[0].TokenIDs, outs[0].FinishReason, outs[0].Text
	a.prefill, a.decode = first.Sub(start), last.Sub(first)
	return a, nil
}
