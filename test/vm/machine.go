package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/vm/wire"
)

// machine is how to start one.
type machine struct {
	qemu, accel    string
	cpu            string
	args           string // that the kernel gets besides
	processors, mb int
	timeout        time.Duration
}

// The kernel's command line. Warnings are printed, since they are failures. A processor that is emulated on a busy host may be
// away for long, which says nothing about the kernel: its watchdogs for that are off, a real hang ends by the timeout. Modules of tunnels
// would otherwise put a device of theirs into every network namespace.
const kernelArgs = "console=ttyS0 rdinit=/init loglevel=5 panic=-1 oops=panic nowatchdog rcupdate.rcu_cpu_stall_timeout=300 " +
	"mitigations=off init_on_alloc=0 tsc=reliable no_timer_check fb_tunnels=none"

// boot runs a kernel with its root until the machine is off, and hands each frame on. The console goes into a file.
func (m machine) boot(ctx context.Context, image, root, console string, frame func(wire.Frame)) error {
	ctx, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, m.qemu,
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-accel", m.accel, "-cpu", m.cpu, "-smp", fmt.Sprint(m.processors), "-m", fmt.Sprint(m.mb),
		"-serial", "file:"+console, "-serial", "stdio",
		"-kernel", image, "-initrd", root, "-append", kernelArgs+" "+m.args)
	cmd.Stderr = os.Stderr
	// The machine ends with the runner, also with one that is killed. The kernel looks at the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", m.qemu, err)
	}
	readErr := readFrames(out, frame)
	err = cmd.Wait()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("the machine was stopped after %v: it hangs, or is too slow (go run ./test/vm -timeout)", m.timeout)
	}
	return errors.Join(err, readErr)
}

// readFrames reads until the port is closed.
func readFrames(r io.Reader, frame func(wire.Frame)) error {
	in := bufio.NewReader(r)
	var damaged error
	for {
		line, err := in.ReadBytes('\n')
		if len(line) > 0 {
			var f wire.Frame
			if e := json.Unmarshal(line, &f); e != nil && damaged == nil {
				damaged = fmt.Errorf("damaged line from the machine: %q", line)
			} else if e == nil {
				frame(f)
			}
		}
		if err != nil {
			return damaged
		}
	}
}
