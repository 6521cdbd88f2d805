package cni

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"golang.org/x/sys/unix"
)

// What the tests tell the plugin that they execute. The plugin of the product reads none of it.
const (
	killAt   = "ECCNI_KILL_AT"   // step of ADD before which the process kills itself
	failAt   = "ECCNI_FAIL_AT"   // step of ADD that fails
	waitTime = "ECCNI_WAIT"      // how long to wait for locks
	ipamWait = "ECCNI_IPAM_WAIT" // how long to wait for another ipam plugin
	portWait = "ECCNI_PORT_WAIT" // how long to wait for programs that serve host ports
	fakeIPAM = "ECCNI_IPAM_DIR"  // where the fake ipam plugin keeps what it was asked, and so does a fake portmap
)

// TestMain lets the test binary be the plugin: executed by the name of one and with a command, it does what the
// plugin does, and can be killed or made to fail at any step.
func TestMain(m *testing.M) {
	if os.Getenv("CNI_COMMAND") == "" {
		os.Exit(m.Run())
	}
	if name := filepath.Base(os.Args[0]); name == ipamName || name == portmapPlugin {
		runFakeIPAM()
		return
	}
	p := &plugin{stdout: os.Stdout, stderr: os.Stderr, wait: lockWait, delegateWait: delegateWait, hostPortWait: hostPortWait, step: injected}
	if d, err := time.ParseDuration(os.Getenv(waitTime)); err == nil {
		p.wait = d
	}
	if d, err := time.ParseDuration(os.Getenv(ipamWait)); err == nil {
		p.delegateWait = d
	}
	if d, err := time.ParseDuration(os.Getenv(portWait)); err == nil {
		p.hostPortWait = d
	}
	if e := skel.PluginMainFuncsWithError(p.funcs(), versions(), "test"); e != nil {
		_ = e.Print()
		os.Exit(1)
	}
}

func injected(step string) error {
	switch step {
	case os.Getenv(killAt):
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	case os.Getenv(failAt):
		return errors.New("made to fail at " + step)
	}
	return nil
}
