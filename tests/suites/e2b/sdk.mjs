// E2B's JavaScript SDK on a Ringfence server: prints one JSON object of what it saw.
const { Sandbox, Template } = await import(process.env.SUITE_SDK)
const seen = {}
const box = await Sandbox.create({ timeoutMs: 60_000, metadata: { made: 'by-js' } })
try {
  seen.running = await box.isRunning()
  seen.state = (await box.getInfo()).state
  const result = await box.commands.run('echo out; echo err >&2')
  seen.command = [result.stdout, result.stderr, result.exitCode]
  seen.failed = await box.commands.run('exit 4').catch((error) => [error.name, error.exitCode])
  const handle = await box.commands.run('cat', { background: true, stdin: true })
  await box.commands.sendStdin(handle.pid, 'line\n')
  await box.commands.closeStdin(handle.pid)
  seen.stdin = (await handle.wait()).stdout
  await box.files.write([{ path: 'd/one', data: '1' }, { path: 'd/two', data: '2' }])
  seen.names = (await box.files.list('d')).map((entry) => entry.name)
  await box.files.write('zip', 'z'.repeat(9999), { gzip: true })
  seen.gzip = (await box.files.read('zip', { gzip: true })).length
  const events = []
  const told = new Promise((resolve) => {
    box.files.watchDir('d', (event) => { events.push(event.type); if (event.type === 'write') resolve() })
      .then(async (watch) => { await box.files.write('d/new', '1'); await told; await watch.stop() })
  })
  await told
  seen.events = [events[0], events.includes('write')]
  const bytes = []
  const onData = (data) => bytes.push(Buffer.from(data))
  const pty = await box.pty.create({ cols: 80, rows: 24, onData })
  await box.pty.sendInput(pty.pid, new TextEncoder().encode('echo $((40+2)); exit\n'))
  await pty.wait()
  seen.pty = Buffer.concat(bytes).toString().includes('42')
  seen.code = (await box.runCode('x = 20; print(x); x + 1')).text
  const context = await box.createCodeContext({ cwd: '/tmp' })
  seen.contexts = (await box.listCodeContexts()).length
  await box.removeCodeContext(context)
  seen.download = await (await fetch(await box.downloadUrl('d/one'))).text()
  const form = new FormData()
  form.append('file', new Blob(['up']), 'name')
  seen.upload = (await fetch(await box.uploadUrl('up'), { method: 'POST', body: form })).status
  seen.uploaded = await box.files.read('up')
  seen.paused = await box.pause()
  const again = await Sandbox.connect(box.sandboxId)
  seen.back = (await again.commands.run('echo back')).stdout
  const pages = Sandbox.list({ query: { metadata: { made: 'by-js' } } })
  seen.listed = (await pages.nextItems()).length
} finally {
  seen.killed = await box.kill()
}
seen.after = await box.isRunning()
const steps = Template().fromBaseImage().setWorkdir('/home/user/app').copy('sdk.mjs', '.')
const template = steps.runCmd('wc -l < sdk.mjs > lines').setReadyCmd('test -s lines')
await Template.build(template, 'by-js')
seen.exists = [await Template.exists('by-js'), await Template.exists('nowhere')]
const built = await Sandbox.create('by-js')
seen.built = (await built.commands.run('cat lines; wc -l < sdk.mjs')).stdout.split('\n')
await built.kill()
console.log(JSON.stringify(seen))
