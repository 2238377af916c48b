package tenants

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Alibaba are the tables of Alibaba's cluster-trace-gpu-v2020 that memory in use follows from, as
// its CSV files have them: without a header (one is skipped), columns in the order of its README.
type Alibaba struct {
	// Machines is pai_machine_spec: machine, gpu_type, cap_cpu, cap_mem, cap_gpu.
	Machines io.Reader
	// Sensors is pai_sensor_table; of its columns worker_name (the third) and avg_gpu_wrk_mem (the
	// eleventh), in GB, the mean over the instance's life.
	Sensors io.Reader
	// Instances is pai_instance_table: of its columns worker_name (the fourth), start_time, end_time
	// (the seventh and eighth), in seconds, and machine (the ninth).
	Instances io.Reader
}

// Cluster is how many bytes of the memory of whole machines is in use over time: a peer of the trace is
// a machine, with the memory of all of its GPUs together.
type Cluster struct {
	Trace    Trace
	Capacity map[device.Space]int64
	// Used and Skipped are instances: those that are in the trace, and those that have no times, no machine
	// with GPUs, or no reading of a sensor.
	Used, Skipped int
}

// gpuBytes is the memory of a GPU by the trace's gpu_type. The trace does not state it. MISC are older ones
// (K40m, K80, M60), which have 8 to 12 GB.
var gpuBytes = map[string]int64{"T4": 16 << 30, "P100": 16 << 30, "V100": 16 << 30, "V100M32": 32 << 30, "MISC": 12 << 30}

// maxGB is more than the GPUs of a machine have.
const maxGB = 1e5

// change is of the bytes in use on a machine.
type change struct {
	machine device.Space
	at      float64 // in seconds
	bytes   int64
}

// ReadAlibaba reads the tables. An instance holds the mean of its memory from its start to its end. An
// error names the table and the line.
func ReadAlibaba(t Alibaba) (*Cluster, error) {
	c := &Cluster{Capacity: map[device.Space]int64{}}
	machines := map[string]device.Space{}
	err := eachRow(t.Machines, "pai_machine_spec", "machine", 5, func(row []string) error {
		n, err := strconv.ParseFloat(row[4], 64)
		if err != nil || !(n >= 0 && n <= 1024) {
			return fmt.Errorf("cap_gpu is %q and must be a number of GPUs", row[4])
		}
		bytes, ok := gpuBytes[row[1]]
		if n == 0 {
			return nil
		}
		if !ok {
			return fmt.Errorf("gpu_type is %q, whose memory is not known: must be T4, P100, V100, V100M32 or MISC", row[1])
		}
		if _, twice := machines[row[0]]; twice {
			return fmt.Errorf("machine %q has two lines", row[0])
		}
		s := device.HBM(len(machines))
		machines[row[0]], c.Capacity[s] = s, int64(n*float64(bytes))
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Millions of workers: their names are not kept.
	held := map[uint64]float64{}
	err = eachRow(t.Sensors, "pai_sensor_table", "job_name", 16, func(row []string) error {
		if row[10] == "" {
			return nil // it used no GPU
		}
		gb, err := strconv.ParseFloat(row[10], 64)
		if err != nil || !(gb >= 0 && gb <= maxGB) {
			return fmt.Errorf("avg_gpu_wrk_mem is %q and must be in GB", row[10])
		}
		held[hash(row[2])] += gb // a row for each of its GPUs
		return nil
	})
	if err != nil {
		return nil, err
	}
	var changes []change
	err = eachRow(t.Instances, "pai_instance_table", "job_name", 9, func(row []string) error {
		gb, known := held[hash(row[3])]
		machine, there := machines[row[8]]
		if !known || !there || row[6] == "" || row[7] == "" {
			c.Skipped++
			return nil
		}
		from, errFrom := strconv.ParseFloat(row[6], 64)
		to, errTo := strconv.ParseFloat(row[7], 64)
		if errFrom != nil || errTo != nil || !(from >= 0 && to < maxTraceSeconds) {
			return fmt.Errorf("start_time and end_time are %q and %q and must be in seconds", row[6], row[7])
		}
		if to <= from {
			c.Skipped++
			return nil
		}
		c.Used++
		bytes := int64(min(gb, maxGB) * (1 << 30))
		changes = append(changes, change{machine, from, bytes}, change{machine, to, -bytes})
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(changes) == 0 {
		return nil, fmt.Errorf("tenants: the tables have no instance with times, a machine with GPUs and a sensor's reading (%d without)", c.Skipped)
	}
	c.replay(changes)
	return c, nil
}

// replay turns changes into the trace: samples from time 0 on of every machine.
func (c *Cluster) replay(changes []change) {
	first := math.Inf(1)
	for _, x := range changes {
		first = min(first, x.at)
	}
	for s := range c.Capacity {
		changes = append(changes, change{machine: s, at: first})
	}
	slices.SortStableFunc(changes, func(a, b change) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.machine, b.machine), cmp.Compare(a.bytes, b.bytes))
	})
	level := map[device.Space]int64{}
	for i, x := range changes {
		level[x.machine] += x.bytes
		if next := i + 1; next < len(changes) && changes[next].at == x.at && changes[next].machine == x.machine {
			continue
		}
		at := time.Duration(math.Round((x.at - first) * 1e9))
		c.Trace = append(c.Trace, Sample{at, x.machine, level[x.machine]})
	}
}

func hash(name string) uint64 {
	h := fnv.New64a()
	io.WriteString(h, name) //nolint:errcheck // it never fails
	return h.Sum64()
}

// eachRow calls f with the rows of a table, but for a header, whose first field is first.
func eachRow(in io.Reader, table, first string, columns int, f func([]string) error) error {
	r := csv.NewReader(in)
	r.FieldsPerRecord, r.ReuseRecord = columns, true
	for line := 1; ; line++ {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && (line > 1 || row[0] != first) {
			err = f(row)
		}
		if err != nil {
			return fmt.Errorf("tenants: %s line %d: %w", table, line, err)
		}
	}
}
