package kv

import (
	"encoding/csv"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/eval"
)

// Result is a measurement of loads, or of copies by block size.
type Result struct {
	Run eval.Run `json:"run"`
	eval.Machine
	*Loads
	*Sizes
}

// Loads are a measurement by Reload.
type Loads struct {
	// BlockTokens is the number of tokens of a block.
	BlockTokens int `json:"block_tokens"`
	// FileDirectory is that of the files; empty: there are none.
	FileDirectory string `json:"file_directory,omitempty"`
	// Entries are the sizes of what is loaded, Reloads the points, ordered by entry, count
	// and layout.
	Entries []Entry       `json:"kv_entries"`
	Reloads []ReloadPoint `json:"reloads"`
}

// Sizes are a measurement by Copies.
type Sizes struct {
	// ThreadBlocks of the kernel's launch; 0: one per multiprocessor.
	ThreadBlocks int         `json:"thread_blocks"`
	Copies       []CopyPoint `json:"copies"`
	// Crossovers of the kernel and the copy engines; none where only one was measured, or devices
	// are emulated.
	Crossovers []Crossover `json:"crossovers"`
}

// WriteTable writes a line for each point for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	b.WriteString(eval.Header(&r.Run, &r.Machine))
	if r.Loads != nil {
		r.Loads.table(&b)
		if r.Loads.hasFiles() && r.virtual() {
			b.WriteString("the virtual clock of emulated devices does not count reading files: times of files are those of the copies behind it, and there are no raw rates\n")
		}
	}
	if r.Sizes != nil {
		r.Sizes.table(&b, r.Emulated)
	}
	if r.Unpaced() {
		b.WriteString("emulated devices without rates copy as fast as this CPU does: host and peer do not compare; give --emulate rates, with virtual or pace\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// WriteCSV writes a line per point. The columns are the keys of the JSON objects, those of
// objects inside joined by an underscore.
func WriteCSV(out io.Writer, r *Result) error {
	w := csv.NewWriter(out)
	write := func(columns []string, rows [][]string) {
		w.Write(slices.Concat(eval.ProvenanceColumns, columns)) //nolint:errcheck // Flush keeps the error
		for _, row := range rows {
			w.Write(append(eval.Provenance(&r.Run, &r.Machine), row...)) //nolint:errcheck // as above
		}
	}
	if r.Loads != nil {
		write(r.Loads.csv())
	}
	if r.Sizes != nil {
		write(r.Sizes.csv())
	}
	w.Flush()
	return w.Error()
}

// Plot draws loads over the number of entries, or the rate of copies over the size of blocks.
// format is one of eval.PlotFormats.
func Plot(out io.Writer, format string, r *Result) error {
	on := r.Device
	if r.Emulated {
		on = r.EmulatedNote()
	}
	if r.Loads != nil {
		if r.Loads.hasFiles() && r.virtual() {
			on += ", whose virtual clock does not count reading files"
		}
		return r.Loads.figure(on, !r.Unpaced()).Write(out, format)
	}
	return r.Sizes.figure(on, r.Emulated).Write(out, format)
}

// virtual reports whether times are those of a virtual clock.
func (r *Result) virtual() bool {
	return r.Emulation != nil && r.Emulation.Rates == eval.RatesVirtual
}

func float(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
