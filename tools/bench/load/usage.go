package load

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// CPU is how one CPU spent its time, as /proc/stat has it: in steps of 10 ms, so that one short sample says little and
// the sum of many says much.
type CPU struct {
	User, Nice, System, IRQ, SoftIRQ time.Duration
	Steal                            time.Duration // taken away by the hypervisor
	Idle                             time.Duration // waiting for disks included
}

// Busy is all of the time that the CPU worked for this machine.
func (c CPU) Busy() time.Duration { return c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ }

// plus adds the times of two.
func (c CPU) plus(d CPU) CPU {
	return CPU{
		User: c.User + d.User, Nice: c.Nice + d.Nice, System: c.System + d.System, IRQ: c.IRQ + d.IRQ,
		SoftIRQ: c.SoftIRQ + d.SoftIRQ, Steal: c.Steal + d.Steal, Idle: c.Idle + d.Idle,
	}
}

// minus is what went by since d.
func (c CPU) minus(d CPU) CPU {
	return CPU{
		User: c.User - d.User, Nice: c.Nice - d.Nice, System: c.System - d.System, IRQ: c.IRQ - d.IRQ,
		SoftIRQ: c.SoftIRQ - d.SoftIRQ, Steal: c.Steal - d.Steal, Idle: c.Idle - d.Idle,
	}
}

// Process is the CPU time of one end. User and System are as getrusage has them: their sum is precise, and includes the interrupts and
// softirqs that came while the process ran, for it or not.
type Process struct {
	User, System time.Duration
	Delayed      time.Duration // ready to run, while something else had the CPU
}

// Busy is the process's CPU time.
func (p Process) Busy() time.Duration { return p.User + p.System }

// Usage is the CPU time that went by inside the window of a sample.
type Usage struct {
	Window         time.Duration // as it came out, not as it was asked for
	CPUs           []CPU         // by number of the CPU
	Client, Server Process
}

// Machine is the sum of all CPUs.
func (u Usage) Machine() (sum CPU) {
	for _, c := range u.CPUs {
		sum = sum.plus(c)
	}
	return sum
}

// tick is the unit of /proc/stat: USER_HZ is 100 on every architecture that Go runs on.
const tick = 10 * time.Millisecond

// parseStat reads the lines of the single CPUs in /proc/stat. A CPU that is offline has none, and is zero in the result.
func parseStat(text string) ([]CPU, error) {
	var cpus []CPU
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "cpu" {
			continue
		}
		name, ok := strings.CutPrefix(fields[0], "cpu")
		if !ok {
			break // the CPUs come first
		}
		number, err := strconv.ParseUint(name, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("parse /proc/stat: the number of %q: %w", fields[0], err)
		}
		cpu, err := parseCPU(fields[1:])
		if err != nil {
			return nil, fmt.Errorf("parse /proc/stat: %s: %w", fields[0], err)
		}
		for len(cpus) <= int(number) {
			cpus = append(cpus, CPU{})
		}
		cpus[number] = cpu
	}
	if len(cpus) == 0 {
		return nil, fmt.Errorf("parse /proc/stat: no CPU in %.80q", text)
	}
	return cpus, nil
}

// parseCPU reads user nice system idle iowait irq softirq steal; what follows (guests) is part of these.
func parseCPU(fields []string) (CPU, error) {
	if len(fields) < 8 {
		return CPU{}, fmt.Errorf("%d numbers, want 8 or more", len(fields))
	}
	var n [8]time.Duration
	for i := range n {
		ticks, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return CPU{}, err
		}
		n[i] = time.Duration(ticks) * tick
	}
	return CPU{User: n[0], Nice: n[1], System: n[2], Idle: n[3] + n[4], IRQ: n[5], SoftIRQ: n[6], Steal: n[7]}, nil
}

// elapsed is what each CPU did between the two.
func elapsed(before, after []CPU) ([]CPU, error) {
	if len(before) != len(after) {
		return nil, fmt.Errorf("compare CPU times: there were %d CPUs, now there are %d", len(before), len(after))
	}
	cpus := make([]CPU, len(after))
	for i := range after {
		cpus[i] = after[i].minus(before[i])
	}
	return cpus, nil
}

// usage is that of a sample whose window counter measured.
func usage(counter, client, server report) Usage {
	return Usage{Window: counter.Measured, CPUs: counter.CPUs, Client: client.Process, Server: server.Process}
}

// perSecond is a rate over the window that r measured.
func perSecond(n uint64, r report) float64 { return float64(n) / r.Measured.Seconds() }

// What a sample may be disturbed by, as shares of its window: an end that was ready to run waited for its CPU, or the hypervisor took the
// CPU away. One tick more of that: it is counted in ticks.
const (
	delayLimit = 20 // one in so many
	stealLimit = 50
)

// check refuses a sample during which something else used the CPUs of the two ends.
func (u Usage) check(what string, t Target) error {
	for _, p := range []struct {
		name    string
		cpu     int
		process Process
	}{{"client", t.ClientCPU, u.Client}, {"server", t.ServerCPU, u.Server}} {
		stolen := time.Duration(0)
		if p.cpu < len(u.CPUs) {
			stolen = u.CPUs[p.cpu].Steal
		}
		if stolen > u.Window/stealLimit+tick {
			return fmt.Errorf("%w: %s: the hypervisor took CPU %d away for %s of %s", ErrStarved, what, p.cpu, stolen, u.Window.Round(time.Millisecond))
		}
		// Where both share a CPU, each waits for the other.
		if t.ClientCPU != t.ServerCPU && p.process.Delayed > u.Window/delayLimit {
			return fmt.Errorf("%w: %s: the %s waited %s of %s for CPU %d", ErrStarved,
				what, p.name, p.process.Delayed.Round(time.Millisecond), u.Window.Round(time.Millisecond), p.cpu)
		}
	}
	return nil
}

// Delayed is the share of the window for which the end that waited more was ready to run, and did not.
func (u Usage) Delayed() float64 {
	if u.Window <= 0 {
		return 0
	}
	return max(u.Client.Delayed, u.Server.Delayed).Seconds() / u.Window.Seconds()
}

// lossLimit is one packet in so many. The sender is paced, so that it overruns no queue: what is lost, the network has lost, and a
// network that throws packets away is not fast.
const lossLimit = 1000

// check refuses a sample that measured something other than forwarding.
func (r UDPResult) check(t Target) error {
	what := fmt.Sprintf("udp of %d bytes", r.Size)
	switch {
	case r.Packets == 0:
		return unmeasured("%s: the receiver saw nothing of %d datagrams", what, r.Sent)
	case r.Received > r.Sent:
		return unmeasured("%s: %d datagrams were sent and %d received", what, r.Sent, r.Received)
	case r.Overflow*lossLimit > r.Sent:
		return unmeasured("%s: the receiver's socket had no room for %d of %d datagrams", what, r.Overflow, r.Sent)
	case r.Lost*lossLimit > r.Sent:
		return unmeasured("%s: %d of %d datagrams were lost", what, r.Lost, r.Sent)
	}
	return r.Usage.check(what, t)
}
