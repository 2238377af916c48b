package tenants_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/tenants"
)

// tables are rows in the layout of the published ones: two machines with GPUs, one without; worker w1 on
// two GPUs, w2 beside it for a time, w3 on the other machine; w4 still runs, w5 has no sensor.
const (
	specTable   = "machine,gpu_type,cap_cpu,cap_mem,cap_gpu\nm1,V100,96,512,2\nm2,T4,96,512,1\nm3,CPU,96,512,0\n"
	sensorTable = "j,t,w1,i,m1,/dev/nvidia0,1,1,1,1,2.5,3,1,1,1,1\nj,t,w1,i,m1,/dev/nvidia1,1,1,1,1,1.5,3,1,1,1,1\n" +
		"j,t,w2,i,m1,/dev/nvidia0,1,1,1,1,8,9,1,1,1,1\nj,t,w3,i,m2,/dev/nvidia0,1,1,1,1,4,9,1,1,1,1\n" +
		"j,t,w4,i,m2,/dev/nvidia0,1,1,1,1,4,9,1,1,1,1\nj,t,w6,i,m2,,1,1,1,1,,,1,1,1,1\n"
	instanceTable = "j,t,n,w1,i,Terminated,1000,2000,m1\nj,t,n,w2,i,Terminated,1500.0,2000.0,m1\nj,t,n,w3,i,Failed,1200,1300,m2\n" +
		"j,t,n,w4,i,Running,1200,,m2\nj,t,n,w5,i,Terminated,1200,1300,m2\nj,t,n,w1,i,Terminated,1200,1300,m3\n"
)

func TestReadAlibaba(t *testing.T) {
	read := func(spec, sensors, instances string) (*tenants.Cluster, error) {
		return tenants.ReadAlibaba(tenants.Alibaba{Machines: strings.NewReader(spec), Sensors: strings.NewReader(sensors), Instances: strings.NewReader(instances)})
	}
	c, err := read(specTable, sensorTable, instanceTable)
	if err != nil {
		t.Fatal(err)
	}
	const gib = int64(1) << 30
	m1, m2 := device.HBM(0), device.HBM(1)
	at := func(seconds int) time.Duration { return time.Duration(seconds) * time.Second }
	want := tenants.Trace{
		{0, m1, 4 * gib},
		{0, m2, 0},
		{at(200), m2, 4 * gib},
		{at(300), m2, 0},
		{at(500), m1, 12 * gib},
		{at(1000), m1, 0},
	}
	if !slices.Equal(c.Trace, want) || len(c.Capacity) != 2 || c.Capacity[m1] != 32*gib || c.Capacity[m2] != 16*gib || c.Used != 3 || c.Skipped != 3 {
		t.Errorf("%+v", c)
	}
	// It can be replayed as a recording.
	var b bytes.Buffer
	if err := c.Trace.Write(&b); err != nil {
		t.Fatal(err)
	}
	if _, err := tenants.Read(&b, []device.Space{m1, m2}, 0); err != nil {
		t.Error(err)
	}
	for want, tables := range map[string][3]string{
		"pai_machine_spec line 1: gpu_type is \"H9\"":          {"m1,H9,96,512,2\n", sensorTable, instanceTable},
		"pai_machine_spec line 2: cap_gpu is \"x\"":            {"m1,T4,96,512,2\nm2,T4,96,512,x\n", sensorTable, instanceTable},
		"pai_machine_spec line 1: record on line 1: wrong":     {"m1,T4\n", sensorTable, instanceTable},
		"pai_machine_spec line 2: machine \"m1\" has two":      {"m1,T4,96,512,2\nm1,T4,96,512,2\n", sensorTable, instanceTable},
		"pai_sensor_table line 1: avg_gpu_wrk_mem is \"-1\"":   {specTable, "j,t,w1,i,m1,g,1,1,1,1,-1,3,1,1,1,1\n", instanceTable},
		"pai_instance_table line 1: start_time and end_time a": {specTable, sensorTable, "j,t,n,w1,i,Terminated,x,2000,m1\n"},
		"the tables have no instance":                          {specTable, sensorTable, ""},
	} {
		if _, err := read(tables[0], tables[1], tables[2]); err == nil || !strings.HasPrefix(err.Error(), "tenants: "+want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// What can be read can be replayed, and nobody holds less than nothing.
func FuzzReadAlibaba(f *testing.F) {
	f.Add(specTable, sensorTable, instanceTable)
	f.Add("m1,MISC,1,1,0.5\n", "j,t,w,i,m1,g,,,,,1e5,,,,,\n", "j,t,n,w,i,s,0,1e-9,m1\n")
	f.Fuzz(func(t *testing.T, spec, sensors, instances string) {
		c, err := tenants.ReadAlibaba(tenants.Alibaba{Machines: strings.NewReader(spec), Sensors: strings.NewReader(sensors), Instances: strings.NewReader(instances)})
		if err != nil {
			return
		}
		last := time.Duration(-1)
		for _, s := range c.Trace {
			if s.Bytes < 0 || s.At < last || c.Capacity[s.Peer] < 0 {
				t.Fatalf("%+v", c)
			}
			last = s.At
		}
		var b bytes.Buffer
		if err := c.Trace.Write(&b); err != nil {
			t.Fatal(err)
		}
		if _, err := tenants.Read(&b, nil, 0); err != nil {
			t.Fatalf("%v: %s", err, b.String())
		}
	})
}
