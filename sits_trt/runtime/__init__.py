"""From requests to tokens. Import the module that you need; nothing is loaded here.

Request -> Sequence -> Step -> StepInputs -> (runner, sampler) -> StepResult -> TokenEvent

request     what a caller asks for and gets          executor   the thread; submit, cancel, events, shutdown
sampling    its parameters, resolved                 load       an engine directory as an executor
sequence    its state in the scheduler               pool       how many tiles this machine affords
answer      its text, and where it ends              stats      counts and times
stops, detokenizer                                   runners/   what computes a step: null, eager

scheduler   decides: schedule, apply, add, abort     step       the nouns of one step
tiles       who holds which tile                     batch      a step as arrays
prefix      names of what tiles hold                 sampler    logits to tokens
sharing     prefills divide a step                   uniforms   its random numbers
"""
