package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/serving"
	"github.com/moeserve/moeserve/untrusted"
)

// loadOptions are the flags of bench serve alone.
type loadOptions struct {
	baseURL, endpoint, model, percentiles, csv, label string
	rate, burstiness, rampStrategy, goodput           string
	rampStart, rampEnd                                float64
	dataset                                           string
	prefixLen                                         int
	rangeRatio                                        float64
	shared                                            serving.PrefixRepetition
	maxConcurrency, warmups                           int
	detailed                                          bool
}

// loadSettings are the settings that bench serve shares with other commands.
var loadSettings = []string{"num-prompts", "input-len", "output-len", "dataset-path", "seed", "temperature", "ignore-eos", "json", "log-level", "log-format"}

// The data sets of --dataset-name, with vLLM's names.
const (
	mtBenchSet = "mt-bench"
	randomSet  = "random"
	prefixSet  = "prefix_repetition"
	customSet  = "custom"
	traceSet   = "timed_trace"
)

func newBenchServe(s *streams) *cobra.Command {
	var o loadOptions
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Measure a server under load: TTFT, TPOT, ITL and throughput",
		Long: `Measure an OpenAI-compatible server (moeserve serve, vLLM, or another) under load, as
vllm bench serve does: requests arrive at a rate, all at once, so that a number of
them runs at any time, or as a trace says, and stream their completions. Of each are
measured the time to the first token (TTFT), the time per output token after it
(TPOT), the time between chunks (ITL) and the end-to-end latency; --goodput bounds
them. Flags, and the fields of --json, have vLLM's names.

--dataset-name says what is sent:

  random             random ids from the model's vocabulary, for which the
                     server needs /tokenize, as many as MT-Bench's prompts have
                     tokens, or --input-len
  prefix_repetition  random ids of which many begin alike
  timed_trace        random ids, and arrivals, as a file in Mooncake's format
                     says: a JSON object a line with timestamp (ms),
                     input_length, output_length and hash_ids of blocks of 512
                     tokens
  mt-bench           first turns of a file of MT-Bench or MT-Bench-101
  custom             a file of JSON objects, one a line, with prompt and
                     output_tokens

Ends of sequence are ignored in random and timed_trace, as vLLM does, unless there
is --ignore-eos=false, and in the others with --ignore-eos.

The default is mt-bench with --dataset-path, else random. The key of MOESERVE_API_KEY,
else of OPENAI_API_KEY, is sent if it is set.

Ctrl-C ends the measurement with the requests that have completed.`,
		Example: `  moeserve bench serve --base-url http://127.0.0.1:8000 \
      --request-rate 4 --num-prompts 100 --goodput ttft:500,tpot:50
  moeserve bench serve --max-concurrency 8 --input-len 512 --output-len 128 \
      --ignore-eos --csv load.csv
  moeserve bench serve --dataset-name timed_trace --dataset-path trace.jsonl \
      --ignore-eos --json load.json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			if o.dataset == traceSet && !set.given("num-prompts") {
				set.Bench.NumPrompts = 0 // all of the trace
			}
			return benchServe(cmd.Context(), s, set, &o)
		},
	}
	keys := slices.DeleteFunc(slices.Clone(configs.Schema), func(k configs.Key) bool { return !slices.Contains(loadSettings, k.Name) })
	for i := range keys {
		if keys[i].Name == "output-len" { // elsewhere ends of sequence are always ignored
			keys[i].Help = "maximum tokens to generate per request, and with --ignore-eos exactly as many"
		}
	}
	addSettings(cmd.Flags(), keys)
	f := cmd.Flags()
	f.StringVar(&o.baseURL, "base-url", "http://127.0.0.1:8000", "`URL` of the server, without /v1")
	f.StringVar(&o.endpoint, "endpoint", serving.Completions, "`PATH` of the endpoint: "+strings.Join(serving.Endpoints, " or "))
	f.StringVarP(&o.model, "model", "m", "", "`NAME` of the model on the server; without it, the server's first")
	f.StringVar(&o.dataset, "dataset-name", "", "what is sent, a `NAME`: random, prefix_repetition, timed_trace, mt-bench or custom")
	f.IntVar(&o.prefixLen, "random-prefix-len", 0, "`TOKENS` that begin all random prompts, in addition to --input-len")
	f.Float64Var(&o.rangeRatio, "random-range-ratio", 0, "`RATIO`, from 0 to below 1, by which lengths of random prompts and of outputs are below and above their means")
	f.IntVar(&o.shared.PrefixLen, "prefix-repetition-prefix-len", 256, "`TOKENS` of each prefix of prefix_repetition")
	f.IntVar(&o.shared.SuffixLen, "prefix-repetition-suffix-len", 256, "`TOKENS` behind it")
	f.IntVar(&o.shared.Prefixes, "prefix-repetition-num-prefixes", 10, "`NUMBER` of prefixes")
	f.StringVar(&o.rate, "request-rate", "inf", "requests per second, a `RATE`; inf sends all at once")
	f.StringVar(&o.burstiness, "burstiness", "1", "`SHAPE` of the gamma distribution of the times between requests: 1 is a Poisson process, less has bursts, inf is even")
	f.StringVar(&o.rampStrategy, "ramp-up-strategy", "", "change the rate from the first request to the last, a `STRATEGY`: linear or exponential")
	f.Float64Var(&o.rampStart, "ramp-up-start-rps", 0, "first `RATE` of --ramp-up-strategy, in requests per second")
	f.Float64Var(&o.rampEnd, "ramp-up-end-rps", 0, "last `RATE` of --ramp-up-strategy, in requests per second")
	f.IntVar(&o.maxConcurrency, "max-concurrency", 0, "maximum `NUMBER` of requests that run at once; 0: no limit")
	f.IntVar(&o.warmups, "num-warmups", 1, "`NUMBER` of requests that are sent first and not counted")
	f.StringVar(&o.goodput, "goodput", "", "`BOUNDS` in ms that a good request keeps, as ttft:500,tpot:50,e2el:10000")
	f.StringVar(&o.percentiles, "metric-percentiles", "90,99", "comma-separated `LIST` of percentiles to report, beside the median")
	f.StringVar(&o.label, "label", "", "`TEXT` in the results' field label")
	f.BoolVar(&o.detailed, "save-detailed", false, "write what was measured of each request to --json too")
	addCSV(cmd, &o.csv)
	return cmd
}

// parse reads the flags into the options of a load.
func (o *loadOptions) parse(set *settings) (l serving.Options, err error) {
	l = serving.Options{
		OutputLen: set.Bench.OutputLen, IgnoreEOS: set.Generate.IgnoreEOS, Temperature: set.Generate.Temperature, Seed: set.Generate.Seed,
		MaxConcurrency: o.maxConcurrency, Warmups: o.warmups, Detailed: o.detailed, Label: o.label,
		Timed: o.dataset == traceSet,
	}
	if u, err := url.Parse(o.baseURL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return l, usagef("--base-url is %q: must be a URL such as http://127.0.0.1:8000", o.baseURL)
	}
	if !slices.Contains(serving.Endpoints, o.endpoint) {
		return l, usagef("--endpoint is %q: must be %s", o.endpoint, strings.Join(serving.Endpoints, " or "))
	}
	if err := o.parseDataset(set); err != nil {
		return l, err
	}
	if (o.dataset == randomSet || o.dataset == traceSet) && !set.given("ignore-eos") {
		l.IgnoreEOS = true
	}
	if l.Arrivals, err = o.parseArrivals(); err != nil {
		return l, err
	}
	if o.maxConcurrency < 0 {
		return l, usagef("--max-concurrency is %d: must be at least 0", o.maxConcurrency)
	}
	if o.warmups < 1 {
		return l, usagef("--num-warmups is %d: must be at least 1, so that a server that refuses is known before the measurement", o.warmups)
	}
	if l.Goodput, err = serving.ParseGoodput(o.goodput); err != nil {
		return l, usagef("--goodput: %w", err)
	}
	for _, text := range strings.Split(o.percentiles, ",") {
		p, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(p > 0 && p < 100) {
			return l, usagef("--metric-percentiles is %q: must be comma-separated numbers above 0 and below 100", o.percentiles)
		}
		l.Percentiles = append(l.Percentiles, p)
	}
	return l, nil
}

// parseDataset checks the flags about what is sent, and fills in the default of --dataset-name.
func (o *loadOptions) parseDataset(set *settings) error {
	path := set.Bench.DatasetPath
	if o.dataset == "" {
		if o.dataset = randomSet; path != "" {
			o.dataset = mtBenchSet
		}
	}
	if names := []string{randomSet, prefixSet, traceSet, mtBenchSet, customSet}; !slices.Contains(names, o.dataset) {
		return usagef("--dataset-name is %q: must be one of %s", o.dataset, strings.Join(names, ", "))
	}
	switch generated := o.dataset == randomSet || o.dataset == prefixSet; {
	case generated && path != "":
		return usagef("--dataset-name %s reads no file: leave out --dataset-path, or name another data set", o.dataset)
	case !generated && path == "":
		return usagef("--dataset-name %s needs a file: --dataset-path", o.dataset)
	case o.endpoint == serving.ChatCompletions && o.dataset != mtBenchSet && o.dataset != customSet:
		return usagef("--endpoint %s needs text: give prompts with --dataset-path, of %s or %s", o.endpoint, mtBenchSet, customSet)
	case o.prefixLen < 0 || !(o.rangeRatio >= 0 && o.rangeRatio < 1):
		return usagef("--random-prefix-len is %d and --random-range-ratio %v: must be at least 0, and from 0 to below 1", o.prefixLen, o.rangeRatio)
	case o.shared.PrefixLen < 1 || o.shared.SuffixLen < 1 || o.shared.Prefixes < 1:
		return usagef("--prefix-repetition-prefix-len is %d, -suffix-len %d and -num-prefixes %d: must be at least 1", o.shared.PrefixLen, o.shared.SuffixLen, o.shared.Prefixes)
	}
	return nil
}

// parseArrivals reads the flags about when requests are sent.
func (o *loadOptions) parseArrivals() (a serving.Arrivals, err error) {
	if o.rate != "inf" {
		if a.Rate, err = strconv.ParseFloat(o.rate, 64); err != nil || !(a.Rate > 0) || math.IsInf(a.Rate, 0) {
			return a, usagef("--request-rate is %q: must be a number above 0, or inf", o.rate)
		}
	}
	if a.Burstiness, err = strconv.ParseFloat(o.burstiness, 64); err != nil || !(a.Burstiness > 0) {
		return a, usagef("--burstiness is %q: must be a number above 0, or inf", o.burstiness)
	}
	a.Ramp = serving.Ramp{Strategy: o.rampStrategy, Start: o.rampStart, End: o.rampEnd}
	switch strategies := []string{"", serving.Linear, serving.Exponential}; {
	case !slices.Contains(strategies, o.rampStrategy):
		return a, usagef("--ramp-up-strategy is %q: must be linear or exponential", o.rampStrategy)
	case o.rampStrategy != "" && a.Rate != 0:
		return a, usagef("--ramp-up-strategy has rates of its own: leave out --request-rate")
	case o.rampStrategy != "" && !(o.rampStart > 0 && o.rampEnd > 0):
		return a, usagef("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0")
	case o.rampStrategy == "" && (o.rampStart != 0 || o.rampEnd != 0):
		return a, usagef("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy, linear or exponential")
	case o.dataset == traceSet && (a.Rate != 0 || o.rampStrategy != ""):
		return a, usagef("--dataset-name %s has arrivals of its own: leave out --request-rate and --ramp-up-strategy", traceSet)
	}
	return a, nil
}

func benchServe(ctx context.Context, s *streams, set *settings, o *loadOptions) (err error) {
	load, err := o.parse(set)
	if err != nil {
		return err
	}
	if err := s.output("--csv", o.csv); err != nil {
		return err
	}
	load.Run = thisRun(s)
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	c := &serving.Client{BaseURL: o.baseURL, Endpoint: o.endpoint, Model: o.model, APIKey: serverKey()}
	if c.Model == "" {
		models, err := c.Models(ctx)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("no server listens on %s; start one, or give its --base-url: %w", c.BaseURL, err)
		}
		if err != nil {
			return err
		}
		c.Model = models[0]
	}
	if load.Requests, err = o.requests(ctx, c, set); err != nil {
		return err
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("requests", "requests")
	load.Progress = func(done, total int) { p.set("requests", int64(done), int64(total)) }
	r, interrupted := serving.Run(ctx, c, load)
	p.end()
	if interrupted != nil && r.Completed == 0 {
		return interrupted
	}
	var files []outputFile
	if o.csv != "" {
		files = append(files, outputFile{"--csv", o.csv, func(w io.Writer) error { return serving.WriteCSV(w, &r) }})
	}
	written := writeAll(s, res, r, files, func(w io.Writer) error { return serving.WriteTable(w, &r) })
	return errors.Join(written, interrupted)
}

// serverKey is the key that the environment has for servers.
func serverKey() string {
	if key := os.Getenv("MOESERVE_API_KEY"); key != "" {
		return key
	}
	return os.Getenv("OPENAI_API_KEY")
}

// requests reads the requests, or makes them of the model's vocabulary.
func (o *loadOptions) requests(ctx context.Context, c *serving.Client, set *settings) ([]serving.Request, error) {
	n, path, seed := set.Bench.NumPrompts, set.Bench.DatasetPath, set.Generate.Seed
	switch o.dataset {
	case mtBenchSet:
		texts, err := readTexts(path)
		if err != nil {
			return nil, err
		}
		requests := make([]serving.Request, n)
		for i := range requests {
			requests[i].Text = texts[i%len(texts)]
		}
		return requests, nil
	case customSet:
		data, err := readDataset(path)
		if err != nil {
			return nil, err
		}
		all, err := serving.ReadCustom(data, path)
		if err != nil {
			return nil, benchError(err)
		}
		requests := make([]serving.Request, n)
		for i := range requests {
			requests[i] = all[i%len(all)]
		}
		return requests, nil
	}
	vocabulary, err := c.Vocabulary(ctx)
	var refused *serving.StatusError
	if errors.As(err, &refused) {
		return nil, fmt.Errorf("random prompts need the server's tokenizer: %w; give prompts with --dataset-path", err)
	}
	if err != nil {
		return nil, err
	}
	switch o.dataset {
	case prefixSet:
		shared := o.shared
		shared.Count = n
		return shared.Requests(vocabulary, seed), nil
	case traceSet:
		data, err := readDataset(path)
		if err != nil {
			return nil, err
		}
		requests, err := serving.ReadTrace(data, path, n, vocabulary, seed)
		return requests, benchError(err)
	}
	r := serving.Random{Count: n, InputLen: set.Bench.InputLen, OutputLen: set.Bench.OutputLen, RangeRatio: o.rangeRatio, PrefixLen: o.prefixLen}
	return r.Requests(vocabulary, seed), nil
}

// readDataset reads a file of requests.
func readDataset(path string) (io.Reader, error) {
	data, err := untrusted.ReadFile(path, untrusted.MaxData)
	if err != nil {
		return nil, usagef("--dataset-path: %w", err)
	}
	return bytes.NewReader(data), nil
}

// readTexts reads the first turns of a file of MT-Bench.
func readTexts(path string) ([]string, error) {
	data, err := readDataset(path)
	if err != nil {
		return nil, err
	}
	texts, err := eval.ReadPrompts(data, path)
	return texts, benchError(err)
}
