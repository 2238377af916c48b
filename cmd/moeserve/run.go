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
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/planner"
)

// maxPromptBytes bounds a prompt on standard input: more than the longest context
// of any preset can hold.
const maxPromptBytes = 16 << 20

// runOptions are the flags and arguments of run alone.
type runOptions struct {
	promptIDs string
	quiet     bool
	verbose   bool
	// prompt; nil: from standard input.
	prompt *string
	// note is about how the arguments are understood; empty: there is no doubt.
	note string
}

func newRun(s *streams) *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run [MODEL] [PROMPT]",
		Short: "Generate a completion for one prompt",
		Long: `Generate a completion for one prompt, and report how fast, and where experts were.

MODEL is the directory of a checkpoint, a preset, or built-in: a small model inside
this binary, which is also the default. One argument is the MODEL if it is a preset,
a file or a directory, or looks like a model's name, and else the PROMPT; behind --
it is always the PROMPT. Without PROMPT, or with -, the prompt is read from standard
input, less one line end at its end.

A model with a chat template, which the built-in one has, too, gets the prompt as a
user's message; --raw sends it as it is.

The completion goes to standard output as it is generated, the report to standard
error.`,
		Example: `  moeserve run --offload-fraction 50% 'sort: t h e m o e ='
  moeserve run /models/mixtral-8x7b -n 200 'Why is the sky blue?'
  moeserve run qwen1.5-moe-a2.7b --load-format dummy --num-hidden-layers 2 \
      --prompt-ids 1,2,3`,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := splitRun(args, cmd.Flags().Changed(modelFlag), cmd.Flags().ArgsLenAtDash())
			if err != nil {
				return err
			}
			o.prompt = r.prompt
			if r.model != nil {
				if err := setModel(cmd, *r.model); err != nil {
					return err
				}
			}
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			if r.doubtful {
				name, err := modelName(set)
				if err != nil {
					return err
				}
				o.note = fmt.Sprintf("%q is not a model, and is taken as the prompt of %s (write -- in front of a prompt)", *r.prompt, name)
			}
			return run(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("run"))
	cmd.Flags().StringVar(&o.promptIDs, "prompt-ids", "", "prompt as comma-separated token `IDS`, instead of PROMPT")
	cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "print the completion only")
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
func readPrompt(ctx context.Context, in io.Reader, set *settings, o *runOptions) (*prompt, error) {
	if err := o.missing(set); err != nil {
		return nil, err
	}
	if o.promptIDs != "" {
		if o.prompt != nil {
			return nil, usagef("both a PROMPT and --prompt-ids; leave one of them out")
		}
		ids, err := parseIDs(o.promptIDs)
		return &prompt{ids: ids}, err
	}
	if o.prompt != nil && *o.prompt == "" {
		return nil, usagef("the prompt is empty")
	}
	if o.prompt != nil && *o.prompt != stdoutName {
		return &prompt{text: *o.prompt}, nil
	}
	if o.prompt == nil && interactive(in) {
		return nil, usagef("no prompt; give it as an argument or on standard input, or start a conversation with moeserve chat")
	}
	data, err := readAll(ctx, io.LimitReader(in, maxPromptBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read the prompt: %w", err)
	}
	if len(data) > maxPromptBytes {
		return nil, usagef("the prompt on standard input is longer than %s", sizing.Bytes(maxPromptBytes))
	}
	text := strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r")
	if text == "" {
		return nil, usagef("the prompt on standard input is empty; give one there or as an argument")
	}
	return &prompt{text: text}, nil
}

// readAll reads to the end, or until ctx is done.
func readAll(ctx context.Context, in io.Reader) ([]byte, error) {
	var data []byte
	err := interruptible(ctx, func() (err error) {
		data, err = io.ReadAll(in)
		return err
	})
	if err != nil {
		return nil, err
	}
	return data, nil
}

// missing names all that a preset lacks for a completion and that the command line does
// not give, at once.
func (o *runOptions) missing(set *settings) error {
	name := set.Model.Name
	if _, ok := configs.Preset(name); !ok {
		return nil
	}
	var flags []string
	if set.Model.LoadFormat != configs.LoadDummy {
		flags = append(flags, "--load-format dummy (random weights)")
	}
	if o.promptIDs == "" {
		flags = append(flags, "--prompt-ids 1,2,3 (instead of text)")
	}
	if len(flags) == 0 {
		return nil
	}
	return usagef("%s is a preset, which has neither weights nor a tokenizer; add %s, or download the model: %s; moeserve inspect %s shows what fits",
		name, strings.Join(flags, " and "), checkpoint.Download(configs.PresetRepository(name)), name)
}

func parseIDs(list string) ([]int32, error) {
	fields := strings.Split(list, ",")
	ids := make([]int32, len(fields))
	for i, f := range fields {
		id, err := strconv.ParseInt(strings.TrimSpace(f), 10, 32)
		if err != nil || id < 0 {
			return nil, usagef("--prompt-ids: %q is not a token id; give comma-separated whole numbers from 0", f)
		}
		ids[i] = int32(id)
	}
	return ids, nil
}

func run(ctx context.Context, s *streams, set *settings, o *runOptions) (err error) {
	if err := s.inPlace("--trace", set.Output.Trace); err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	if err := checkpoint.Find(set.Model.Name); err != nil {
		return err // before anybody types a prompt
	}
	p, err := readPrompt(ctx, s.in, set, o)
	if err != nil {
		return err
	}

	opts := node.Options{
		Settings: set.Settings, Explicit: set.given, Workload: p.workload(set), Log: set.logger(s.err),
		ExpectCPU: o.quiet || set.Model.Name == "", // the built-in model is small enough for that
	}
	if p.ids != nil && set.Model.Name != "" {
		// Ids need no tokenizer, but where there is one it gives their text.
		_, err := os.Stat(filepath.Join(set.Model.Name, "tokenizer.json"))
		opts.WithoutTokenizer = errors.Is(err, fs.ErrNotExist)
	}
	if p.ids == nil && !set.Generate.Raw {
		opts.Template = checkpoint.TemplateIfAny
	}
	n, err := open(ctx, s, opts, o.quiet)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	set.Settings = n.Info().Settings
	if o.note != "" {
		s.notice(&set.Output, "%s", o.note)
	}

	if p.ids == nil {
		text := n.Text()
		if text.Template != nil && !set.Generate.Raw {
			p.ids, err = text.EncodeChat([]chat.Message{{Role: "user", Content: p.text}})
		} else {
			p.ids, err = text.Encode(p.text)
		}
		if err != nil {
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
		if most := set.Generate.MaxTokens; a.finish == engine.FinishLength && len(a.ids) < most {
			s.notice(&set.Output, "the context ends the completion after %d of --max-tokens %d: prompt and completion have at most %d tokens together (--max-model-len)",
				len(a.ids), most, n.Info().Limits.MaxModelLen)
		}
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
	o.RuntimeDir = runtimeDir(o.Settings.Harvest.RuntimeDir)
	o.Progress = func(done, total int64) { p.set(what, done, total) }
	return node.Open(ctx, o)
}

// answer is a completion, and when it was generated.
type answer struct {
	prompt, ids []int32
	text        string
	finish      engine.FinishReason
	// prefill is the time to the first token, decode the time from there to the last, on the machine's clock.
	prefill, decode time.Duration
}

// generate runs the prompt and streams the completion's text to out. With an error that is
// ctx's comes what there was by then.
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
	clock := n.Machine() // a virtual one, too
	start := clock.Now()
	var first, last time.Duration
	began := false
	outs, err := n.Engine().Generate(ctx, []engine.Request{{Prompt: from.ids, Encoded: from.encoded, Params: p}}, func(_ int, u engine.Update) {
		last = clock.Now()
		if !began {
			first, began = last, true
		}
		for _, t := range u.Tokens {
			a.ids = append(a.ids, t.ID)
		}
		a.text += u.Text
		say(u.Text)
	})
	if began && n.Text().Tokenizer != nil {
		say("\n")
	}
	if broken != nil {
		return nil, fmt.Errorf("write the completion: %w", broken)
	}
	a.prefill, a.decode = max(0, first-start), last-first
	if err != nil {
		return a, err
	}
	a.ids, a.finish, a.text = outs[0].TokenIDs, outs[0].FinishReason, outs[0].Text
	return a, nil
}
