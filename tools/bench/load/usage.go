package load

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Usage is the CPU time that went by inside the window of a sample.
type Usage struct {
	Window time.Duration // as it came out, not as it was asked for
	// Kernel is the time that the machine's CPUs spent in the kernel: system calls, interrupts and softirqs; SoftIRQ is the part of the last two. Steps
	// of 10 ms: one short sample says little and the sum of many says much.
	Kernel, SoftIRQ time.Duration
	// Stolen is what the hypervisor took of each CPU.
	Stolen         []time.Duration
	Client, Server Process
	// broken says that the kernel's files were not as they should be.
	broken error
}

// Process is the CPU time of one end. Busy is precise, and includes the interrupts and softirqs that came while it ran, for it or not.
type Process struct {
	Busy    time.Duration
	Delayed time.Duration // ready to run, while something else had the CPU
}

// edge is the state of the machine and of an end's thread at one edge of the window.
type edge struct {
	at            time.Duration
	cpus          []cpu
	busy, delayed time.Duration
	err           error
}

// cpu is how one CPU has spent its time since it came up.
type cpu struct{ kernel, softIRQ, stolen time.Duration }

// usage is that of a sample whose window one of the ends has measured.
func usage(counter, client, server *end) (u Usage) {
	u.Window = counter.last.at - counter.first.at
	before, after := counter.first.cpus, counter.last.cpus
	if len(before) != len(after) || len(after) == 0 {
		u.broken = fmt.Errorf("compare CPU times: there were %d CPUs, now there are %d", len(before), len(after))
	} else {
		for i, cpu := range after {
			u.Kernel += cpu.kernel - before[i].kernel
			u.SoftIRQ += cpu.softIRQ - before[i].softIRQ
			u.Stolen = append(u.Stolen, cpu.stolen-before[i].stolen)
		}
	}
	for process, e := range map[*Process]*end{&u.Client: client, &u.Server: server} {
		*process = Process{e.last.busy - e.first.busy, e.last.delayed - e.first.delayed}
		u.broken = errors.Join(u.broken, e.first.err, e.last.err)
	}
	return u
}

// tick is the unit of /proc/stat: USER_HZ is 100 on every architecture that Go runs on.
const tick = 10 * time.Millisecond

func ticks(n int) time.Duration { return time.Duration(n) * tick }

// parseStat reads the lines of the single CPUs in /proc/stat, which come first.
func parseStat(text string) (cpus []cpu, err error) {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "cpu ") {
			continue
		}
		if !strings.HasPrefix(line, "cpu") {
			break
		}
		var id, user, nice, system, idle, iowait, irq, softirq, steal int
		_, err := fmt.Sscanf(line, "cpu%d %d %d %d %d %d %d %d %d", &id, &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal)
		if err != nil {
			return nil, fmt.Errorf("parse /proc/stat: %q: %w", line, err)
		}
		cpus = append(cpus, cpu{kernel: ticks(system + irq + softirq), softIRQ: ticks(irq + softirq), stolen: ticks(steal)})
	}
	if len(cpus) == 0 {
		return nil, fmt.Errorf("parse /proc/stat: no CPU in %.80q", text)
	}
	return cpus, nil
}

// parseDelay reads how long a thread was ready to run and did not, from its schedstat: time on the CPU, time waiting for it, turns.
func parseDelay(text string) (delayed time.Duration, err error) {
	var busy, turns int64
	if _, err := fmt.Sscan(text, &busy, (*int64)(&delayed), &turns); err != nil {
		return 0, fmt.Errorf("parse /proc/thread-self/schedstat, for which the kernel needs CONFIG_SCHED_INFO: %q: %w", text, err)
	}
	return delayed, nil
}

// What a sample may be disturbed by, as shares of its window: an end that was ready to run waited for its CPU, or the hypervisor took the
// CPU away. One tick more of that: it is counted in ticks.
const (
	delayLimit = 20 // one in so many
	stealLimit = 50
)

// check refuses a sample during which something else used the CPUs of the two ends.
func (u Usage) check(t Target) error {
	if u.broken != nil {
		return u.broken
	}
	for _, p := range []struct {
		name    string
		cpu     int
		process Process
	}{{"client", t.ClientCPU, u.Client}, {"server", t.ServerCPU, u.Server}} {
		if p.cpu < len(u.Stolen) && u.Stolen[p.cpu] > u.Window/stealLimit+tick {
			return fmt.Errorf("%w: the hypervisor took CPU %d away for %s of %s", ErrStarved, p.cpu, u.Stolen[p.cpu], u.Window.Round(time.Millisecond))
		}
		// Where both share a CPU, each waits for the other.
		if t.ClientCPU != t.ServerCPU && p.process.Delayed > u.Window/delayLimit {
			return fmt.Errorf("%w: the %s waited %s of %s for CPU %d", ErrStarved,
				p.name, p.process.Delayed.Round(time.Millisecond), u.Window.Round(time.Millisecond), p.cpu)
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
