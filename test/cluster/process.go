package cluster

import (
	"context"
	"fmt"
	"os"
	"syscall"
)

// Start starts a program that goes on, under a name. Its output is appended to log/NAME.log in the machine's directory.
func (m *Machine) Start(ctx context.Context, name string, argv ...string) error {
	_, err := m.ask(ctx, request{Verb: verbStart, Name: name, Argv: argv, Env: os.Environ(), Log: m.path("log", name+".log")})
	return err
}

// Run runs a program in the machine to its end; its output is complete also with an error.
func (m *Machine) Run(ctx context.Context, argv ...string) (string, error) {
	answer, err := m.ask(ctx, request{Verb: verbRun, Argv: argv, Env: os.Environ()})
	if err == nil && answer.Status != 0 {
		err = fmt.Errorf("%v on %s: exit status %d: %s", argv, m.Name, answer.Status, answer.Output)
	}
	return string(answer.Output), err
}

// Stop sends a program a signal and waits until it has ended.
func (m *Machine) Stop(ctx context.Context, name string, signal syscall.Signal) error {
	if _, err := m.ask(ctx, request{Verb: verbSignal, Name: name, Signal: signal}); err != nil {
		return err
	}
	_, err := m.Wait(ctx, name)
	return err
}

// Wait waits until a program has ended, and is its exit status.
func (m *Machine) Wait(ctx context.Context, name string) (status int, err error) {
	answer, err := m.ask(ctx, request{Verb: verbWait, Name: name})
	return answer.Status, err
}

// Running is the process id of a program, as the machine sees it; an error when it has ended.
func (m *Machine) Running(ctx context.Context, name string) (int, error) {
	answer, err := m.ask(ctx, request{Verb: verbStatus, Name: name})
	if err == nil && answer.PID == 0 {
		err = fatal{fmt.Errorf("%s on %s has ended with status %d\n%s", name, m.Name, answer.Status, m.LogTail(name, 30))}
	}
	return answer.PID, err
}
